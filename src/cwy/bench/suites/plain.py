"""Where the time of plain steps goes: the host's share, and the device's by kernel.

``python -m cwy.bench.suites.plain FILE`` writes it. It takes about a minute on an H200.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from ... import _atomic
from ..output.rows import caption, context
from . import Size, show_size
from .model import entries

SEED = 0
SAMPLES = 25
"""Steps whose times are taken one by one."""
IN_A_ROW = 25
"""Steps that run without synchronization in between."""
PROFILED = 5
"""Steps that the profiler sees."""
KERNELS = 5
"""Kernels that are shown, those that take most time."""
NAME_LENGTH = 84
"""Characters of a kernel's name that are shown."""

SIZES: tuple[Size, ...] = (
    (256, 1, 512),
    (256, 24, 512),
    (1024, 12, 512),
    (32, 32, 10, 32, 1020),
    (190, 190, 10, 128, 1020),
    (190, 190, 128, 128, 512),
    (512, 512, 128, 128, 512),
    (1024, 1024, 128, 128, 512),
    (2048, 128, 128, 64, 512),
)
"""Sizes as of ``cwy bench model``."""
SHOWN = tuple(
    f"{kind}{mode}" for kind in ("free", "cwy", "cwy together") for mode in ("", " (autocast)")
)
"""The entries that are timed. Compiled ones leave little to the host."""


class Times(NamedTuple):
    """Hold the seconds of a step.

    Attributes:
        wall: until the device has finished, after a pause.
        host: until the last call returns, after a pause.
        pipelined: when many steps run in a row.
    """

    wall: float
    host: float
    pipelined: float


@dataclass(frozen=True)
class Launches:
    """Hold what ran on the device.

    Attributes:
        seconds: of each kernel, in one step.
        counts: how often each runs in one step.
    """

    seconds: dict[str, float]
    counts: dict[str, float]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_times(step: Callable[[], object], device: torch.device) -> Times:
    """Time a step that is warm."""
    wall = []
    host = []
    for _ in range(SAMPLES):
        _synchronize(device)
        begin = time.perf_counter()
        step()
        host.append(time.perf_counter() - begin)
        _synchronize(device)
        wall.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    for _ in range(IN_A_ROW):
        step()
    _synchronize(device)
    pipelined = (time.perf_counter() - begin) / IN_A_ROW
    return Times(median(wall), median(host), pipelined)


def take_launches(step: Callable[[], object], device: torch.device) -> Launches:
    """Profile a step that is warm. On a CPU nothing is launched."""
    seconds: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, float] = defaultdict(float)
    if device.type == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(PROFILED):
                step()
            _synchronize(device)
        for event in found.events() or ():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                seconds[event.name] += event.time_range.elapsed_us() * 1e-6 / PROFILED
                counts[event.name] += 1 / PROFILED
    return Launches(dict(seconds), dict(counts))


def measure(size: Size, device: torch.device) -> Iterator[str]:
    """Yield the lines of one size."""
    for entry in entries(size):
        if entry.name not in SHOWN:
            continue
        torch.manual_seed(SEED)
        case = entry.make(torch.float32, device)
        step = functools.partial(case.call, *case.inputs)
        for _ in range(PROFILED):
            step()
        times = take_times(step, device)
        launches = take_launches(step, device)
        yield f"{show_size(size)} {entry.name}: {_shown(times)}"
        yield from _table(launches)


def _shown(times: Times) -> str:
    wall, host, pipelined = (1e3 * seconds for seconds in times)
    return f"wall {wall:.3f} host {host:.3f} pipelined {pipelined:.3f} ms"


def _table(launches: Launches) -> Iterator[str]:
    if not launches.seconds:
        return
    total = 1e3 * sum(launches.seconds.values())
    yield f"  device {total:.3f} ms in {sum(launches.counts.values()):.0f} launches"
    longest = sorted(launches.seconds, key=lambda name: -launches.seconds[name])
    for name in longest[:KERNELS]:
        took = 1e6 * launches.seconds[name]
        yield f"  {took:8.1f} us x{launches.counts[name]:5.1f} {name[:NAME_LENGTH]}"


def record(sizes: tuple[Size, ...], device: torch.device, command: str) -> Iterator[str]:
    """Yield the lines of the record."""
    yield (
        f"Plain steps as of cwy bench model: medians of {SAMPLES} steps with a pause before each "
        f"(wall, host), the mean of {IN_A_ROW} in a row (pipelined)."
    )
    yield (
        "The host's time ends when the last call returns. The device's is the sum over kernels "
        f"(torch.profiler, mean of {PROFILED} steps)."
    )
    yield "Sizes are NxDxB of stacks (a step of AdamW for D > 1) and NxLxFxBxT of recurrences."
    yield caption(context(device, SEED), "float32")
    yield f"{command}\n"
    for size in sizes:
        yield from measure(size, device)


def main() -> None:
    """Write the record into a file."""
    parser = argparse.ArgumentParser(description="Split the time of plain steps on a GPU.")
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("cwy.bench.suites.plain: the record is of a GPU.")
    command = shlex.join(["python", "-m", "cwy.bench.suites.plain", *sys.argv[1:]])
    lines = []
    for line in record(SIZES, torch.device("cuda", torch.cuda.current_device()), command):
        print(line, flush=True)
        lines.append(line)
    _atomic.write(given.file, "\n".join([*lines, ""]).encode())


if __name__ == "__main__":
    main()
