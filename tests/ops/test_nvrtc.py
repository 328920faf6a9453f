"""Structures that kernels take: Python and the CUDA compiler agree on every layout."""

import ctypes

import pytest

import cwy.ops  # noqa: F401 - declares the structures of every op
from cwy.ops import _nvrtc
from cwy.ops._nvrtc import compiler
from cwy.ops._nvrtc.driver import LaunchAttribute, LaunchConfig, launch_config

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


@pytest.mark.skipif(_nvrtc.why_not() is not None, reason="the bindings are not installed")
def test_the_configuration_of_a_launch_is_laid_out_as_the_drivers_own():
    driver = compiler.bindings("driver")
    theirs = driver.CUlaunchConfig()
    theirs.gridDimX, theirs.gridDimY, theirs.gridDimZ = 3, 5, 1
    theirs.blockDimX, theirs.blockDimY, theirs.blockDimZ = 7, 1, 1
    theirs.sharedMemBytes = 11
    attributes = []
    names = driver.CUlaunchAttributeID
    cluster = driver.CUlaunchAttribute()
    cluster.id = names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x = 13
    cluster.value.clusterDim.y = 1
    cluster.value.clusterDim.z = 1
    cooperative = driver.CUlaunchAttribute()
    cooperative.id = names.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    cooperative.value.cooperative = 1
    theirs.attrs = [cluster, cooperative]
    theirs.numAttrs = 2
    attributes = [
        LaunchAttribute(int(cluster.id), (13, 1, 1)),
        LaunchAttribute(int(cooperative.id), (1,)),
    ]
    ours = launch_config((3, 5), 7, 11, attributes)
    size = ctypes.sizeof(LaunchConfig)
    pointer = LaunchConfig.attributes
    read = LaunchConfig.from_buffer_copy(ctypes.string_at(int(theirs.getPtr()), size))
    for name, _ in LaunchConfig._fields_:
        if name != "attributes":
            assert getattr(read, name) == getattr(ours, name)
    bytes_of = lambda config: ctypes.string_at(
        ctypes.c_void_p.from_buffer_copy(config, pointer.offset).value, 2 * 72
    )
    for at, length in ((0, 4), (8, 12), (72, 4), (80, 4)):
        assert bytes_of(read)[at : at + length] == bytes_of(ours)[at : at + length]
