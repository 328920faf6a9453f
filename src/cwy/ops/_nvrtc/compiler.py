"""Sources compiled to cubins by NVRTC. Cubins are kept on disk."""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ... import _atomic
from .structures import Structures, header

Macros = Mapping[str, int | float]
Defines = tuple[tuple[str, int | float], ...]


def _installed() -> bool:
    try:
        return find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


INSTALLED = _installed()
#: Headers for the sources of every folder.
SHARED = Path(__file__).parent.parent / "kernels"


def why_not() -> str | None:
    """Return the reason why nothing can be compiled here, or None."""
    if not INSTALLED:
        return "the packages that compile its kernels are not installed: pip install 'cwy[cuda]'"
    if torch.compiler.is_compiling() or not torch.cuda.is_initialized():
        return None
    return _mismatch()


@functools.cache
def _mismatch() -> str | None:
    """Return why the driver can't run what the compiler makes, or None."""
    try:
        _, driver = bindings("driver").cuDriverGetVersion()
        _, compiler, _ = bindings("nvrtc").nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        return f"the compiler of its kernels can't be loaded ({error})"
    if driver // 1000 < compiler:
        return (
            f"the driver is for CUDA {driver // 1000} and the kernels' compiler is "
            f"CUDA {compiler}'s: update the driver"
        )
    return None


def bindings(name: str) -> Any:
    """Import a module of ``cuda.bindings``, which is optional."""
    return importlib.import_module(f"cuda.bindings.{name}")


def value_of(answer: tuple) -> Any:
    """Return the value that a call of the driver or of NVRTC answered, or raise its error."""
    status, *values = answer
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status!r}")
    if values:
        return values[0]
    return None


def cache() -> Path:
    """Return the folder of cubins: ``$CWY_CACHE``, or ``cwy`` in the user's cache folder."""
    own = os.environ.get("CWY_CACHE")
    if own:
        return Path(own)
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(users) / "cwy"


def arch(device: torch.device) -> str:
    """Return the architecture of a GPU, with all of its instructions."""
    major, minor = torch.cuda.get_device_capability(device)
    name = f"sm_{major}{minor}"
    if major >= 9:
        return name + "a"
    return name


def headers(folder: Path, structures: Structures) -> dict[str, str]:
    """Return the text of each header by its name: the folder's, the shared and the generated."""
    texts = {}
    for place in (folder, SHARED):
        for path in sorted(place.glob("*.cuh")):
            texts[path.name] = path.read_text()
    texts["structures.cuh"] = header(structures)
    return texts


def cubin(path: Path, defines: Defines, arch: str, structures: Structures = ()) -> bytes:
    """Return a source compiled for an architecture, from disk if possible. It needs no GPU."""
    nvrtc = bindings("nvrtc")
    source = path.read_text()
    included = headers(path.parent, structures)
    options = [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        *(f"--define-macro={name}={value}" for name, value in defines),
    ]
    version = nvrtc.nvrtcVersion()[1:]
    key = hashlib.sha256(repr((source, included, options, version)).encode()).hexdigest()
    kept = cache() / "cubin" / f"{path.stem}-{arch}-{key[:32]}.cubin"
    try:
        return kept.read_bytes()
    except OSError:
        code = compile_source(path.name, source, included, options)
    _keep(kept, code)
    return code


def _keep(path: Path, code: bytes) -> None:
    """Write a cubin, if its folder can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _atomic.write(path, code, shared=True)
    except OSError:
        pass  # the next process compiles again


def compile_source(name: str, source: str, headers: dict[str, str], options: list[str]) -> bytes:
    """Compile a source with its headers by name, or raise with the log of the compiler."""
    nvrtc = bindings("nvrtc")
    texts = [text.encode() for text in headers.values()]
    names = [header.encode() for header in headers]
    program = value_of(
        nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), len(headers), texts, names)
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(
            program, len(options), [option.encode() for option in options]
        )
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * value_of(nvrtc.nvrtcGetProgramLogSize(program))
            value_of(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(
                f"NVRTC could not compile {name} with {' '.join(options)}:\n"
                f"{log.decode(errors='replace')}"
            )
        code = b" " * value_of(nvrtc.nvrtcGetCUBINSize(program))
        value_of(nvrtc.nvrtcGetCUBIN(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)
