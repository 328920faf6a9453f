"""Clocks: samples of many calls, taken in turn over all entries."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, quantiles, stdev
from typing import Any

import torch

FEWEST = 3
"""The samples that a median needs at least."""


@dataclass(frozen=True)
class Effort:
    """Describe how long to measure.

    Attributes:
        repeats: samples of each entry, at most.
        shortest: seconds that a sample lasts at least. Short calls are repeated within it.
        budget: seconds for the samples of one entry. A slow one gets fewer, but at least 3.
        limit: seconds. An entry of which one call takes longer is skipped.
        total: seconds. An entry not begun by then is skipped, and so is a size not begun by half
            of it.
        graphs: whether, on a GPU, calls are timed as CUDA graphs too.
        counts: whether operations are counted.
    """

    repeats: int
    shortest: float
    budget: float
    limit: float
    total: float = math.inf
    graphs: bool = True
    counts: bool = False


FULL = Effort(repeats=10, shortest=0.02, budget=4.0, limit=5.0)
QUICK = Effort(repeats=5, shortest=0.005, budget=0.2, limit=0.5, total=45.0)


@dataclass
class Timer:
    """Take samples of one call: seconds each, of ``number`` calls in a row.

    Attributes:
        wait: blocks until a result of the call is ready, for calls outside of torch.
        inner: how often a call repeats what is timed.
    """

    call: Callable[[], object]
    device: torch.device
    number: int = 1
    repeats: int = FEWEST
    samples: list[float] = field(default_factory=list)
    wait: Callable[[Any], object] | None = None
    inner: int = 1

    def calibrate(self, effort: Effort, about: float = 0.0) -> None:
        """Warm up, and size the samples by what a call takes.

        Args:
            about: what a call took before, warm, if that is known. A slow call is not repeated.
        """
        seconds = about
        if seconds < 20 * effort.shortest:
            seconds = self.clock()
        if seconds < effort.shortest:
            # That call was cold: only a few in a row show what one takes.
            few = max(1, min(10, int(effort.shortest / seconds)))
            seconds = self.clock(few)
        self.number = max(1, math.ceil(effort.shortest / seconds))
        affordable = int(effort.budget / (seconds * self.number))
        self.repeats = max(FEWEST, min(effort.repeats, affordable))

    def sample(self) -> None:
        """Take one sample."""
        self.samples.append(self.clock(self.number) / self.inner)

    def clock(self, number: int = 1) -> float:
        """Return the seconds per call of a number of calls in a row."""
        return clock(self.call, self.device, number, self.wait)

    def quartiles(self) -> tuple[float, float, float]:
        """Return the first quartile, the median and the third quartile of the samples."""
        low, middle, high = quantiles(self.samples, n=4, method="inclusive")
        return low, middle, high

    def mean(self) -> tuple[float, float]:
        """Return the mean of the samples, and its standard error."""
        return fmean(self.samples), stdev(self.samples) / len(self.samples) ** 0.5


def clock(
    call: Callable[[], object],
    device: torch.device,
    number: int = 1,
    wait: Callable[[Any], object] | None = None,
) -> float:
    """Return the seconds per call of a number of calls in a row.

    The garbage collector is off. On a GPU the time is between two events. Calls outside of torch
    have a ``wait``, which blocks until the last result is ready.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        if wait is not None:
            return _until_ready(call, number, wait)
        if device.type == "cuda":
            return _between_events(call, device, number)
        return _by_the_wall(call, number)
    finally:
        if collecting:
            gc.enable()


def _by_the_wall(call: Callable[[], object], number: int) -> float:
    begin = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - begin) / number


def _until_ready(call: Callable[[], object], number: int, wait: Callable[[Any], object]) -> float:
    begin = time.perf_counter()
    result = None
    for _ in range(number):
        result = call()
    wait(result)
    return (time.perf_counter() - begin) / number


def _between_events(call: Callable[[], object], device: torch.device, number: int) -> float:
    with torch.cuda.device(device):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(number):
            call()
        end.record()
        end.synchronize()
    return start.elapsed_time(end) / 1e3 / number


def in_turn(timers: Sequence[Timer]) -> Iterator[int]:
    """Take all samples round by round, and yield after each.

    So a busy moment of the machine hits all timers alike. A timer of fewer repeats sits out rounds,
    evenly.
    """
    rounds = max((timer.repeats for timer in timers), default=0)
    taken = 0
    for turn in range(rounds):
        for timer in timers:
            if (turn + 1) * timer.repeats // rounds > turn * timer.repeats // rounds:
                timer.sample()
                taken += 1
                yield taken
