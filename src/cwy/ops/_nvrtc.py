"""CUDA C++ compiled at first use by NVRTC: no nvcc and no build step. Cubins are kept on disk."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import os
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _atomic

Argument = Tensor | ctypes.Structure | int | float | None
Defines = tuple[tuple[str, int], ...]
Structures = tuple[type["Structure"], ...]
STRUCTURES = "structures.cuh"
"""The header that declares the structures a kernel takes. It is generated, and included by name."""


def _installed() -> bool:
    try:
        return find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        return False


INSTALLED = _installed()
SHARED = Path(__file__).parent / "kernels"  # headers for the sources of every folder


def why_not() -> str | None:
    """Why nothing can be compiled here, or None if it can."""
    if not INSTALLED:
        return "the packages that compile its kernels are not installed: pip install 'cwy[cuda]'"
    return None if torch.compiler.is_compiling() or not torch.cuda.is_initialized() else _mismatch()


@functools.cache
def _mismatch() -> str | None:
    """What keeps the compiler and the driver apart, if anything does."""
    try:
        (_, driver), (_, compiler, _) = (
            _bindings("driver").cuDriverGetVersion(),
            _bindings("nvrtc").nvrtcVersion(),
        )
    except (ImportError, RuntimeError, OSError) as error:
        return f"the compiler of its kernels can't be loaded ({error})"
    if driver // 1000 < compiler:
        return f"the driver is for CUDA {driver // 1000} and the kernels' compiler is CUDA {compiler}'s: update the driver"
    return None


def _bindings(name: str) -> Any:
    return importlib.import_module(f"cuda.bindings.{name}")


def cache() -> Path:
    """Where cubins are kept: ``$CWY_CACHE``, or ``cwy`` in the user's cache folder."""
    own = os.environ.get("CWY_CACHE")
    return (
        Path(own)
        if own
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cwy"
    )


def arch(device: torch.device) -> str:
    """The architecture of a GPU, with all of its instructions."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


_POINTER = ctypes.c_void_p
_C_TYPES = {"int": ctypes.c_int, "float": ctypes.c_float, "unsigned long long": ctypes.c_uint64}


class Structure(ctypes.Structure):
    """A structure that a kernel takes by value. See :func:`structure`."""

    declaration: str


def structure(name: str, **fields: str) -> type[Structure]:
    """Make a structure from the C types of its fields, and the C text that declares it.

    Example:
        >>> structure("Sizes", data="const float*", n="int").declaration
        'struct Sizes {\\n  const float* data;\\n  int n;\\n};\\n'
    """
    members = [
        (field, _POINTER if kind.endswith("*") else _C_TYPES[kind])
        for field, kind in fields.items()
    ]
    lines = [f"  {kind} {field};\n" for field, kind in fields.items()]
    declaration = f"struct {name} {{\n{''.join(lines)}}};\n"
    return type(name, (Structure,), {"_fields_": members, "declaration": declaration})


def _headers(folder: Path, structures: Structures) -> dict[str, str]:
    """The text of each header by its name: those of a folder, the shared ones, and the generated one."""
    headers = {}
    for place in (folder, SHARED):
        for header in sorted(place.glob("*.cuh")):
            headers[header.name] = header.read_text()
    declarations = [one.declaration for one in structures]
    headers[STRUCTURES] = "#pragma once\n" + "".join(declarations)
    return headers


def cubin(path: Path, defines: Defines, arch: str, structures: Structures = ()) -> bytes:
    """A source compiled for an architecture, from the disk if it was compiled before; no GPU is needed."""
    nvrtc = _bindings("nvrtc")

    source = path.read_text()
    headers = _headers(path.parent, structures)
    options = [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        *(f"--define-macro={name}={value}" for name, value in defines),
    ]
    version = nvrtc.nvrtcVersion()[1:]
    key = hashlib.sha256(repr((source, headers, options, version)).encode()).hexdigest()
    kept = cache() / "cubin" / f"{path.stem}-{arch}-{key[:32]}.cubin"
    try:
        return kept.read_bytes()
    except OSError:
        code = _compile(path.name, source, headers, options)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        _atomic.write(kept, code, shared=True)
    except OSError:
        pass  # a folder that can't be written costs the next process a second, not this one its result
    return code


def _compile(name: str, source: str, headers: dict[str, str], options: list[str]) -> bytes:
    nvrtc = _bindings("nvrtc")

    texts, names = [[part.encode() for part in parts] for parts in (headers.values(), headers)]
    program = _call(
        nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), len(headers), texts, names)
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(
            program, len(options), [option.encode() for option in options]
        )
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * _call(nvrtc.nvrtcGetProgramLogSize(program))
            _call(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(
                f"NVRTC could not compile {name} with {' '.join(options)}:\n{log.decode(errors='replace')}"
            )
        code = b" " * _call(nvrtc.nvrtcGetCUBINSize(program))
        _call(nvrtc.nvrtcGetCUBIN(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _call(answer: tuple) -> Any:
    """The value of a call of the driver or of NVRTC, or an error that says which failed."""
    status, *values = answer
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status!r}")
    return values[0] if values else None


@functools.cache
def _context(index: int) -> Any:
    driver = _bindings("driver")
    return _call(driver.cuDevicePrimaryCtxRetain(_call(driver.cuDeviceGet(index))))


def _make_current(index: int) -> None:
    """Makes torch's context of a GPU the calling thread's: autograd's threads have none until a call of torch needs it."""
    _call(_bindings("driver").cuCtxSetCurrent(_context(index)))


class Kernel:
    """A compiled function on one GPU."""

    def __init__(self, code: bytes, name: str, shared: int = 0, wide: bool = False) -> None:
        driver = _bindings("driver")
        self._driver, self._code, self._shared, self._index = (
            driver,
            code,
            shared,
            torch.cuda.current_device(),
        )
        _make_current(self._index)
        self._function = _call(
            driver.cuModuleGetFunction(_call(driver.cuModuleLoadData(code)), name.encode())
        )
        self._lock = threading.Lock()
        attribute = driver.CUfunction_attribute
        if shared > 48 * 1024:
            key = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _call(driver.cuFuncSetAttribute(self._function, key, shared))
        if wide:
            key = attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            _call(driver.cuFuncSetAttribute(self._function, key, 1))

    def _config(
        self, grid: tuple[int, int], threads: int, cluster: int = 1, cooperative: bool = False
    ) -> Any:
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = self._shared
        attributes = []
        if cluster > 1:
            attribute = self._driver.CUlaunchAttribute()
            attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            (
                attribute.value.clusterDim.x,
                attribute.value.clusterDim.y,
                attribute.value.clusterDim.z,
            ) = cluster, 1, 1
            attributes.append(attribute)
        if cooperative:
            attribute = self._driver.CUlaunchAttribute()
            attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            attributes.append(attribute)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def clusters(self, threads: int, cluster: int) -> int:
        """How many clusters run at once on the current GPU."""
        _make_current(self._index)
        config = self._config((cluster, 1), threads, cluster)
        return _call(self._driver.cuOccupancyMaxActiveClusters(self._function, config))

    def blocks(self, threads: int) -> int:
        """How many blocks run at once on this GPU."""
        _make_current(self._index)
        each = _call(
            self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                self._function, threads, self._shared
            )
        )
        return each * torch.cuda.get_device_properties(self._index).multi_processor_count

    @functools.lru_cache(maxsize=256)  # noqa: B019 - kernels live as long as the process
    def prepare(
        self, grid: tuple[int, int], threads: int, cluster: int = 1, cooperative: bool = False
    ) -> Callable[..., None]:
        """A launch that waits for its arguments alone; the rest as in a call."""
        config, lock, index = (
            self._config(grid, threads, cluster, cooperative),
            self._lock,
            self._index,
        )
        function, enqueue = self._function, self._driver.cuLaunchKernelEx
        lost = self._driver.CUresult.CUDA_ERROR_INVALID_CONTEXT

        def launch(*args: Argument) -> None:
            if torch._C._cuda_getDevice() != index:
                with torch.cuda.device(index):
                    launch(*args)
                return
            values = [_argument(arg) for arg in args]
            pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
            with lock:
                config.hStream = torch._C._cuda_getCurrentRawStream(index)
                (status,) = enqueue(config, function, ctypes.addressof(pointers), 0)
                if status == lost:
                    _make_current(index)
                    (status,) = enqueue(config, function, ctypes.addressof(pointers), 0)
            if status != 0:
                raise RuntimeError(f"CUDA: {status!r}")

        return launch

    def __call__(
        self,
        grid: tuple[int, int],
        threads: int,
        *args: Argument,
        cluster: int = 1,
        cooperative: bool = False,
    ) -> None:
        """Launches on torch's current stream; tensors go as pointers, None as a null one, structures by value.

        A cooperative launch runs all blocks at once, so that they may wait for each other, or fails.
        """
        self.prepare(grid, threads, cluster, cooperative)(*args)


def _argument(arg: Argument) -> Any:
    if isinstance(arg, ctypes.Structure):
        return arg
    if isinstance(arg, Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, float):
        return ctypes.c_float(arg)
    return ctypes.c_void_p(0) if arg is None else ctypes.c_int(arg)


@functools.cache
def _load(
    path: Path,
    name: str,
    defines: Defines,
    structures: Structures,
    shared: int,
    wide: bool,
    index: int,
) -> Kernel:
    with torch.cuda.device(index):
        code = cubin(path, defines, arch(torch.device("cuda", index)), structures)
        return Kernel(code, name, shared, wide)


def kernel(
    path: Path,
    name: str,
    defines: dict[str, int],
    shared: int = 0,
    wide: bool = False,
    structures: Structures = (),
) -> Kernel:
    """Compile the function ``name`` of a source with these macros and structures for the current GPU."""
    macros = tuple(sorted(defines.items()))
    return _load(path, name, macros, structures, shared, wide, torch.cuda.current_device())
