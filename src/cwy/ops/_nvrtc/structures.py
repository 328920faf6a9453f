"""Structures that kernels take by value, declared once for Python and for C."""

from __future__ import annotations

import ctypes

_POINTER = ctypes.c_void_p
_C_TYPES = {"int": ctypes.c_int, "float": ctypes.c_float, "unsigned long long": ctypes.c_uint64}


class Structure(ctypes.Structure):
    """Hold a structure that a kernel takes by value. See :func:`structure`."""

    declaration: str


Structures = tuple[type[Structure], ...]


def structure(name: str, **fields: str) -> type[Structure]:
    """Make a structure from the C types of its fields, and the C text that declares it.

    Example:
        >>> structure("Sizes", data="const float*", n="int").declaration
        'struct Sizes {\\n  const float* data;\\n  int n;\\n};\\n'
    """
    members = [(field, _ctype(kind)) for field, kind in fields.items()]
    lines = [f"  {kind} {field};\n" for field, kind in fields.items()]
    declaration = f"struct {name} {{\n{''.join(lines)}}};\n"
    return type(name, (Structure,), {"_fields_": members, "declaration": declaration})


def copy_of(fields: Structure) -> Structure:
    """Return a structure with the same fields, which costs less than to set them again."""
    return type(fields).from_buffer_copy(fields)


def _ctype(kind: str) -> type:
    if kind.endswith("*"):
        return _POINTER
    return _C_TYPES[kind]


def header(structures: Structures) -> str:
    """Return the header that declares structures. Sources include it as ``structures.cuh``."""
    declarations = [one.declaration for one in structures]
    return "#pragma once\n" + "".join(declarations)
