"""Compiled functions on a GPU, and their launches on torch's current stream."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._torch import gpu_index, gpu_stream
from .compiler import Defines, Macros, arch, bindings, cubin, value_of
from .driver import (
    LaunchAttribute,
    LaunchConfig,
    driver_library,
    launch_config,
)
from .structures import Structures

Argument = Tensor | ctypes.Structure | int | float | None
#: Dynamic shared memory that a kernel may take without being allowed more.
_USUAL_SHARED_BYTES = 48 * 1024


@functools.cache
def _context(index: int) -> Any:
    driver = bindings("driver")
    return value_of(driver.cuDevicePrimaryCtxRetain(value_of(driver.cuDeviceGet(index))))


def _make_current(index: int) -> None:
    """Make torch's context of a GPU current in this thread.

    autograd's threads have no context until a call of torch needs one.
    """
    value_of(bindings("driver").cuCtxSetCurrent(_context(index)))


class Kernel:
    """Launch a compiled function on one GPU.

    Args:
        code: the cubin.
        name: the name of the function.
        shared: bytes of dynamic shared memory of a block.
        large_clusters: whether clusters of more than eight blocks are allowed.
    """

    def __init__(
        self, code: bytes, name: str, shared: int = 0, large_clusters: bool = False
    ) -> None:
        driver = bindings("driver")
        self._driver = driver
        self._code = code
        self._shared = shared
        self._index = torch.cuda.current_device()
        self._lock = threading.Lock()
        _make_current(self._index)
        module = value_of(driver.cuModuleLoadData(code))
        self._function = value_of(driver.cuModuleGetFunction(module, name.encode()))
        attribute = driver.CUfunction_attribute
        if shared > _USUAL_SHARED_BYTES:
            key = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            value_of(driver.cuFuncSetAttribute(self._function, key, shared))
        if large_clusters:
            key = attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            value_of(driver.cuFuncSetAttribute(self._function, key, 1))

    def _config(
        self, grid: tuple[int, int], threads: int, cluster: int = 1, cooperative: bool = False
    ) -> LaunchConfig:
        names = self._driver.CUlaunchAttributeID
        attributes = []
        if cluster > 1:
            name = int(names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            attributes.append(LaunchAttribute(name, (cluster, 1, 1)))
        if cooperative:
            name = int(names.CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
            attributes.append(LaunchAttribute(name, (1,)))
        return launch_config(grid, threads, self._shared, attributes)

    def clusters(self, threads: int, cluster: int) -> int:
        """Return how many clusters of so many blocks run at once on this GPU."""
        _make_current(self._index)
        config = self._config((cluster, 1), threads, cluster)
        count = ctypes.c_int()
        status = driver_library().cuOccupancyMaxActiveClusters(
            ctypes.addressof(count), int(self._function), ctypes.addressof(config)
        )
        if status != 0:
            raise RuntimeError(f"CUDA: {self._driver.CUresult(status)!r}")
        return count.value

    def blocks(self, threads: int) -> int:
        """Return how many blocks run at once on this GPU."""
        _make_current(self._index)
        each = value_of(
            self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                self._function, threads, self._shared
            )
        )
        return each * torch.cuda.get_device_properties(self._index).multi_processor_count

    @functools.lru_cache(maxsize=256)  # noqa: B019 - kernels live as long as the process
    def prepare(
        self, grid: tuple[int, int], threads: int, cluster: int = 1, cooperative: bool = False
    ) -> Callable[..., None]:
        """Return a launch that needs only the arguments of the function.

        It runs on torch's current stream. Tensors are passed as pointers, None as a null pointer,
        structures by value.

        Args:
            grid: blocks along x and y.
            threads: threads of a block.
            cluster: blocks of a cluster.
            cooperative: run all blocks at once, so that they may wait for each other, or fail.
        """
        config = self._config(grid, threads, cluster, cooperative)
        config_address = ctypes.addressof(config)
        lock = self._lock
        index = self._index
        function = int(self._function)
        enqueue = driver_library().cuLaunchKernelEx
        errors = self._driver.CUresult
        lost = int(errors.CUDA_ERROR_INVALID_CONTEXT)

        def launch(*args: Argument) -> None:
            if gpu_index() != index:
                with torch.cuda.device(index):
                    launch(*args)
                return
            values = [_argument(arg) for arg in args]
            pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
            address = ctypes.addressof(pointers)
            with lock:
                config.stream = gpu_stream(index)
                status = enqueue(config_address, function, address, None)
                if status == lost:
                    _make_current(index)
                    status = enqueue(config_address, function, address, None)
            if status != 0:
                raise RuntimeError(f"CUDA: {errors(status)!r}")

        return launch

    def __call__(
        self,
        grid: tuple[int, int],
        threads: int,
        *args: Argument,
        cluster: int = 1,
        cooperative: bool = False,
    ) -> None:
        """Launch the function, as :meth:`prepare` describes."""
        self.prepare(grid, threads, cluster, cooperative)(*args)


def _argument(arg: Argument) -> Any:
    if isinstance(arg, ctypes.Structure):
        return arg
    if isinstance(arg, Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, float):
        return ctypes.c_float(arg)
    if arg is None:
        return ctypes.c_void_p(0)
    return ctypes.c_int(arg)


@functools.cache
def loaded(
    path: Path,
    name: str,
    defines: Defines,
    structures: Structures,
    shared: int,
    large_clusters: bool,
    index: int,
) -> Kernel:
    """Return a function compiled for a GPU, from this process's memory if possible."""
    with torch.cuda.device(index):
        code = cubin(path, defines, arch(torch.device("cuda", index)), structures)
        return Kernel(code, name, shared, large_clusters)


def kernel(
    path: Path,
    name: str,
    defines: Macros,
    shared: int = 0,
    large_clusters: bool = False,
    structures: Structures = (),
) -> Kernel:
    """Return the function ``name`` of a source with these macros, for the current GPU.

    Args:
        path: the source.
        name: the name of the function.
        defines: its macros.
        shared: bytes of dynamic shared memory of a block.
        large_clusters: whether clusters of more than eight blocks are allowed.
        structures: what ``structures.cuh`` declares.
    """
    macros = tuple(sorted(defines.items()))
    return loaded(
        path, name, macros, structures, shared, large_clusters, torch.cuda.current_device()
    )
