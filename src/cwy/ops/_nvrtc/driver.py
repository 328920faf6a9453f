"""The driver's own launch function: its arguments in C, and a call without a wrapper.

``cuda.bindings`` converts arguments to objects in each call, which takes longer than the launch.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import NamedTuple

_VALUE_NUMBERS = 16
"""Numbers of 4 bytes of an attribute's value."""


class LaunchAttribute(NamedTuple):
    """Hold one attribute of a launch.

    Attributes:
        name: its number, a ``CUlaunchAttributeID``.
        value: its numbers.
    """

    name: int
    value: tuple[int, ...]


class _Attribute(ctypes.Structure):
    """Mirror ``CUlaunchAttribute``: a name, and a value of 64 bytes."""

    _fields_ = (
        ("name", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_uint * _VALUE_NUMBERS),
    )


class LaunchConfig(ctypes.Structure):
    """Mirror ``CUlaunchConfig``."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


def launch_config(
    grid: tuple[int, int], threads: int, shared: int, attributes: list[LaunchAttribute]
) -> LaunchConfig:
    """Return the configuration of a launch. Its stream is set before each launch.

    Args:
        grid: blocks along x and y.
        threads: threads of a block.
        shared: bytes of dynamic shared memory of a block.
        attributes: what else the launch needs.
    """
    given = (_Attribute * len(attributes))()
    for place, attribute in zip(given, attributes, strict=True):
        place.name = attribute.name
        for i, number in enumerate(attribute.value):
            place.value[i] = number
    return LaunchConfig(
        grid_x=grid[0],
        grid_y=grid[1],
        grid_z=1,
        block_x=threads,
        block_y=1,
        block_z=1,
        shared_bytes=shared,
        attributes=ctypes.cast(given, ctypes.POINTER(_Attribute)),
        attribute_count=len(attributes),
    )


@functools.cache
def driver_library() -> ctypes.CDLL:
    """Return the driver's library. It is loaded already: torch runs on the GPU."""
    if os.name == "nt":
        library = ctypes.CDLL("nvcuda.dll")
    else:
        library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    library.cuOccupancyMaxActiveClusters.argtypes = [ctypes.c_void_p] * 3
    return library
