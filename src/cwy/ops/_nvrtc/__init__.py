"""CUDA C++ compiled at first use by NVRTC, and launched. It needs no nvcc and no build step."""

from .compiler import Macros, arch, cubin, why_not
from .launch import Kernel, kernel
from .structures import Structure, copy_of, structure

__all__ = [
    "Kernel",
    "Macros",
    "Structure",
    "arch",
    "copy_of",
    "cubin",
    "kernel",
    "structure",
    "why_not",
]
