"""Memory: how much a computation takes at its peak, and how to keep one from taking all there is."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile


def peak(call: Callable[[], object], device: torch.device) -> int:
    """The most bytes that a call holds at once, of what torch's allocator hands out, beyond what was there before.

    On a CPU the allocations are those that torch's profiler records; buffers inside LAPACK are not among them.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # Or the profiler tells every user when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    recorded = cast(Any, profiler.profiler).kineto_results.events()
    changes = sorted((e.start_ns(), i, e.nbytes()) for i, e in enumerate(recorded) if e.name() == "[memory]")
    held = most = 0
    for _, _, change in changes:
        held += change
        most = max(most, held)
    return most


@contextmanager
def bounded() -> Iterator[None]:
    """Makes a CPU allocation beyond nine tenths of the free memory raise, where Linux can, instead of ending the process."""
    free = _free()
    if free is None:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bound = _held() + 9 * free // 10
    if soft != resource.RLIM_INFINITY:
        bound = min(bound, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _free() -> int | None:
    """Bytes that can still be taken, of the machine and of this container; None where the system does not tell."""
    free = _kilobytes("/proc/meminfo", "MemAvailable")
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        left = limit - int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return left if free is None else min(free, left)


def _held() -> int:
    return _kilobytes("/proc/self/status", "VmData") or 0


def _kilobytes(path: str, name: str) -> int | None:
    try:
        found = re.search(rf"^{name}:\s*(\d+) kB", Path(path).read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
