"""CUDA kernels compiled as C++ and run on a CPU, so that a machine without a GPU can test them.

It serves kernels that take one structure and have one-dimensional blocks of whole warps. They may
use ``__syncthreads``, ``__shfl_xor_sync`` and the inline assembly of ``INSTRUCTIONS``.
"""

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from cwy.ops._nvrtc import compiler

COMPILER = shutil.which("g++")
HEADER = Path(__file__).with_suffix(".hpp")
INSTRUCTIONS = {
    "set.neu.f32.f32": "{out} = {given} != 0.f",
    "cvt.f32.f16": "{out} = same_bits<_Float16>({given})",
    "cvt.rn.f16.f32": "{out} = same_bits<unsigned short>((_Float16){given})",
    "cvt.rn.bf16.f32": "{out} = bfloat16_bits({given})",
}
"""What an instruction of inline assembly computes, in C++."""
ASSEMBLY = re.compile(
    r'asm\("(?P<code>[^"]*)"\s*:\s*"=\w"\((?P<out>\w+)\)\s*:\s*"\w"\((?P<given>\w+)\)\)'
)
ENTRY = """
float shared[SHARED_FLOATS];
using Given = {structure};
extern "C" int launch(void (*kernel)(const Given), const Given* given, int blocks, int threads) {{
  return gpu::launch([&] {{ kernel(*given); }}, shared, SHARED_FLOATS, blocks, threads);
}}
"""


class SimulatedKernel:
    """Stand in for :class:`cwy.ops._nvrtc.Kernel`."""

    def __init__(self, library, name):
        self._library = library
        self._function = getattr(library, name)

    def prepare(self, grid, threads):
        blocks, _ = grid

        def launch(fields):
            given = ctypes.byref(fields)
            status = self._library.launch(self._function, given, blocks, threads)
            assert status == 0, "threads wait at different barriers"

        return launch


def kernel(path, name, defines, shared, structures):
    """Stand in for :func:`cwy.ops._nvrtc.kernel`."""
    (structure,) = structures
    macros = dict(defines) | {"SHARED_FLOATS": shared // 4}
    return SimulatedKernel(library(path, tuple(macros.items()), structure), name)


@functools.cache
def library(path, macros, structure):
    """Compile all kernels of a source."""
    with tempfile.TemporaryDirectory() as folder:
        for header, text in compiler.headers(path.parent, (structure,)).items():
            Path(folder, header).write_text(as_cpp(text))
        source = Path(folder, "kernels.cpp")
        source.write_text(as_cpp(path.read_text()) + ENTRY.format(structure=structure.__name__))
        made = Path(folder, "kernels.so")
        options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-include", HEADER, "-o", made]
        definitions = [f"-D{name}={value}" for name, value in macros]
        subprocess.run([COMPILER, *options, *definitions, source], check=True)
        return ctypes.CDLL(str(made))


def as_cpp(source):
    """Return a source with C++ in the place of its inline assembly."""

    def replaced(found):
        (known,) = [name for name in INSTRUCTIONS if name in found["code"]]
        return INSTRUCTIONS[known].format(out=found["out"], given=found["given"])

    return ASSEMBLY.sub(replaced, source)
