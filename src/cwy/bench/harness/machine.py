"""The machine: how much memory a call takes, how much is free, and how busy the CPU is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from torch.profiler import ProfilerActivity, profile


def peak(call: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that a call holds at once, beyond what was there before.

    Only what torch's allocator hands out is counted. On a CPU these are the allocations that
    torch's profiler records, without buffers inside LAPACK.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # Or the profiler prints when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    recorded = cast(Any, profiler.profiler).kineto_results.events()
    memory = [event for event in recorded if event.name() == "[memory]"]
    memory.sort(key=lambda event: event.start_ns())
    held = most = 0
    for event in memory:
        held += event.nbytes()
        most = max(most, held)
    return most


@contextmanager
def bounded() -> Iterator[None]:
    """Make a CPU allocation beyond nine tenths of the free memory raise.

    Linux would otherwise end the process. On systems without such a limit this does nothing.
    """
    if not psutil.LINUX:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    held = psutil.Process().memory_info().data
    bound = held + 9 * _free() // 10
    if soft != resource.RLIM_INFINITY:
        bound = min(bound, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def idle_cores(seconds: float = 1.0) -> float:
    """Return how many of the cores that this process may use are idle.

    Threads that wait for each other need cores of their own.
    """
    cores = psutil.cpu_times_percent(seconds, percpu=True)
    allowed = range(len(cores))
    if hasattr(psutil.Process, "cpu_affinity"):
        allowed = psutil.Process().cpu_affinity() or allowed
    idle = 0.0
    for number, core in enumerate(cores):
        if number in allowed:
            # Linux counts waiting for a disk apart.
            waiting = getattr(core, "iowait", 0.0)
            idle += (core.idle + waiting) / 100
    return idle


def _free() -> int:
    """Return the bytes that can still be taken, of the machine and of this container."""
    free = psutil.virtual_memory().available
    # psutil does not look at containers.
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        held = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return min(free, limit - held)
