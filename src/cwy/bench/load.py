"""How busy the CPU is with other work: threads that wait for each other need cores of their own."""

from __future__ import annotations

import os
import time
from pathlib import Path


def idle_cores(seconds: float = 1.0) -> float | None:
    """How many of the cores that this process may use are idle; None where the system does not tell."""
    before = _idle()
    if before is None:
        return None
    time.sleep(seconds)
    after = _idle() or {}
    allowed = os.sched_getaffinity(0)
    shares = [(after[core][0] - idle, after[core][1] - total) for core, (idle, total) in before.items() if core in after]
    return sum(idle / total for core, (idle, total) in zip(before, shares, strict=True) if core in allowed and total > 0)


def _idle() -> dict[int, tuple[int, int]] | None:
    """Ticks since the system started, of each core: idle, and all."""
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
    except OSError:
        return None
    # The fields are user, nice, system, idle, iowait, …; the first line sums up all cores.
    ticks = {int(name[3:]): [*map(int, times)] for name, *times in lines if name != "cpu"}
    return {core: (times[3] + times[4], sum(times[:8])) for core, times in ticks.items()}
