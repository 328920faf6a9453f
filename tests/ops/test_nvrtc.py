"""Structures that kernels take: Python and the CUDA compiler agree on every layout."""

import ctypes

import pytest

import cwy.ops  # noqa: F401 - declares the structures of every op
from cwy.ops import _nvrtc

STRUCTURES = tuple(sorted(_nvrtc.Structure.__subclasses__(), key=lambda one: one.__name__))
MIXED = _nvrtc.structure(
    "Mixed", a="int", b="const float*", c="float", d="unsigned long long", e="int"
)


def layout(structure):
    """C++ that asserts the size and every offset that ctypes has."""
    name = structure.__name__
    yield f'static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "size");\n'
    for field, _ in structure._fields_:
        offset = getattr(structure, field).offset
        yield f'static_assert(__builtin_offsetof({name}, {field}) == {offset}, "{field}");\n'


def test_every_op_declares_its_structures():
    assert {"Forward", "Backward", "Blocks", "Tensors"} <= {one.__name__ for one in STRUCTURES}


@pytest.mark.skipif(_nvrtc.why_not() is not None, reason="the compiler is not installed")
def test_structures_lie_in_memory_as_python_thinks(monkeypatch, tmp_path):
    monkeypatch.setenv("CWY_CACHE", str(tmp_path))
    structures = (*STRUCTURES, MIXED)
    lines = ['#include "structures.cuh"\n']
    for structure in structures:
        lines += layout(structure)
    source = tmp_path / "layout.cu"
    source.write_text("".join(lines))
    _nvrtc.cubin(source, (), "sm_80", structures)
    source.write_text("".join([*lines, 'static_assert(sizeof(Mixed) == 1, "size");']))
    with pytest.raises(RuntimeError, match=r"layout\.cu"):
        _nvrtc.cubin(source, (), "sm_80", structures)
