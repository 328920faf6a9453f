"""The harness: check every entry, then time those that passed, in turn."""

from __future__ import annotations

import gc
import re
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from .check import Accuracy, CheckFailed, accuracy, alike, judge
from .entry import Entry
from .flops import count
from .graph import Recorded, record
from .memory import bounded, peak
from .peers import why_missing
from .rows import Context, Row, version
from .sizes import Size, show
from .timing import FEWEST, Effort, Timer, clock, in_turn

Watch = Callable[[Size, str, float], object]
"""Told what is being done, and which part of the work at a size is behind."""


class TooSlow(Exception):
    """One call takes longer than the limit."""


@dataclass
class Ready:
    """An entry that passed its check."""

    entry: Entry
    dtype: torch.dtype
    accuracy: Accuracy
    memory: int
    flops: dict[str, int]
    timers: dict[str, Timer]
    """By the field of a row that they fill."""
    ungraphed: str
    """Why a time as a CUDA graph is missing; empty if none is."""

    @property
    def complete(self) -> bool:
        return all(len(timer.samples) >= FEWEST for timer in self.timers.values())


def run(
    bench: str,
    entries: Callable[[Size], Sequence[Entry]],
    sizes: Sequence[Size],
    wanted: Callable[[Entry], bool],
    dtype: torch.dtype,
    where: Context,
    effort: Effort,
    rows: list[Row],
    watch: Watch = lambda size, what, part: None,
) -> None:
    """Measures a benchmark. Rows are added as they are complete, also when it is interrupted.

    Args:
        bench: its name.
        entries: what is timed at a size.
        sizes: in growing order; an entry too slow at one is not tried at the next.
        wanted: which entries take part.
        where: the device and seed, and what else the rows carry.
        rows: where they go.
    """
    too_slow: dict[str, str] = {}
    begin = time.monotonic()
    with bounded() if torch.device(where.device).type == "cpu" else nullcontext(), warnings.catch_warnings():
        # What torch says once a call of copies of weights, and of the first product on a thread of autograd's.
        warnings.filterwarnings("ignore", "RNN module weights are not part|Attempting to run cuBLAS")
        for size in sizes:
            # A size of which only a part fits would compare nothing: none of it is begun late.
            late = size != sizes[0] and time.monotonic() > begin + effort.total / 2
            end = begin if late else begin + effort.total
            _run_size(bench, size, [e for e in entries(size) if wanted(e)], dtype, where, effort, end, too_slow, rows, watch)


def _run_size(
    bench: str,
    size: Size,
    entries: Sequence[Entry],
    dtype: torch.dtype,
    where: Context,
    effort: Effort,
    end: float,
    too_slow: dict[str, str],
    rows: list[Row],
    watch: Watch,
) -> None:
    gc.collect()
    device = torch.device(where.device)
    untimed: dict[str, dict[str, Any]] = {}
    ready: dict[str, Ready] = {}
    try:
        for i, entry in enumerate(entries):
            watch(size, f"checking {entry.name}", i / len(entries) / 2)
            if missing := why_missing(entry.package):
                untimed[entry.name] = {"status": "missing", "reason": missing}
            elif refused := entry.why_not(dtype, device):
                untimed[entry.name] = {"status": "skipped", "reason": refused}
            elif entry.name in too_slow:
                untimed[entry.name] = {"status": "skipped", "reason": too_slow[entry.name]}
            elif time.monotonic() > end:
                untimed[entry.name] = {"status": "skipped", "reason": f"the {effort.total:g} s for all were over"}
            else:
                try:
                    ready[entry.name] = prepare(entry, dtype, device, where.seed, effort)
                except TooSlow as reason:
                    too_slow[entry.name] = f"{reason} at {show(size)}, above the limit of {effort.limit:g} s"
                    untimed[entry.name] = {"status": "skipped", "reason": too_slow[entry.name]}
                except CheckFailed as reason:
                    untimed[entry.name] = {"status": "failed", "reason": str(reason)}
                except Exception as error:
                    untimed[entry.name] = {"status": "failed", "reason": _told(error)}
                    error.__traceback__ = None  # its frames hold memory that the next entry may need
                    gc.collect()
        watch(size, "timing in turn", 0.5)
        timers = [timer for one in ready.values() for timer in one.timers.values()]
        total = sum(timer.repeats for timer in timers)
        for taken in in_turn(timers):
            watch(size, "timing in turn", (1 + taken / total) / 2)
            if time.monotonic() > end and all(one.complete for one in ready.values()):
                break
    finally:
        measured = {name: _measured(one) for name, one in ready.items() if one.complete}
        for entry in entries:
            values = (untimed | measured).get(entry.name)
            if values is not None:
                given: dict[str, Any] = {"bench": bench, "entry": entry.name, "group": entry.group, "about": entry.about}
                given |= {"size": show(size), "dtype": _name(dtype), "package": _package(entry)}
                rows.append(Row(**asdict(where), **(given | values)))


def prepare(entry: Entry, dtype: torch.dtype, device: torch.device, seed: int, effort: Effort) -> Ready:
    """Makes an entry's inputs, runs it once, checks it against float64, measures its memory and sizes its samples."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        case = entry.make(dtype, device)
        call, leaves = case.call, [x.detach().requires_grad_() for x in case.inputs]

        def forward() -> Tensor:
            with torch.no_grad(), entry.within():
                return call(*leaves)

        out = _first(forward, device, effort.limit, "forward")
        cotangent = torch.randn_like(out)

        def both() -> tuple[Tensor, ...]:
            with entry.within():
                return torch.autograd.grad(call(*leaves), leaves, cotangent)

        def inline() -> tuple[Tensor, ...]:
            with torch.autograd.set_multithreading_enabled(False):
                return both()

        gradients = _first(both, device, effort.limit, "forward + backward") if entry.differentiable else None
        errors = accuracy(case, out, cotangent, gradients)
    gate = entry.gate or out.dtype
    judge(errors, gate)
    whole, memory = both if entry.differentiable else forward, []
    seconds = clock(lambda: memory.append(peak(whole, device)), device)
    timers = {"forward": Timer(forward, device)} | ({"both": Timer(both, device)} if entry.differentiable else {})
    plain = list(timers.items())
    if entry.differentiable and device.type == "cuda":
        timers["both_inline"] = Timer(inline, device)
    for timer in timers.values():
        timer.calibrate(effort, seconds if timer.call in (whole, inline) else 0.0)
    missing: dict[str, str] = {}
    if effort.graphs and device.type == "cuda":
        expected = {"forward": out, "both": gradients or ()}
        for name, timer in plain:
            recorded = record(timer.call, device)
            if not isinstance(recorded, Recorded):
                missing[name] = recorded
            elif not alike(recorded.result, expected[name], gate):
                missing[name] = "its replay gives another result than the plain call"
            else:
                timers[f"{name}_graph"] = Timer(recorded.replay, device)
                timers[f"{name}_graph"].calibrate(effort)
    partly = any(name.endswith("_graph") for name in timers)
    flops = count(entry, case, dtype) if effort.counts else {}
    return Ready(entry, out.dtype, errors, memory[0], flops, timers, _ungraphed(missing, partly))


def _ungraphed(missing: dict[str, str], partly: bool) -> str:
    """Why there is no graph; of which time, if there is one of the other. What hinders forward hinders both."""
    name, why = next(iter(missing.items()), ("", ""))
    return f"{'forward alone' if name == 'forward' else 'forward + backward'}: {why}" if partly and why else why


def _first(call: Callable, device: torch.device, limit: float, what: str):
    """The result of a call, unless it is too slow."""
    results = []
    seconds = clock(lambda: results.append(call()), device)
    if limit < seconds < 5 * limit:
        # What is loaded on first use may have made it slow.
        seconds = clock(call, device)
    if seconds > limit:
        raise TooSlow(f"one {what} took {seconds:.2g} s")
    return results[0]


def _measured(ready: Ready) -> dict[str, Any]:
    values: dict[str, Any] = {"status": "ok", "reason": ready.ungraphed, "dtype": _name(ready.dtype), "memory": ready.memory}
    values |= {**asdict(ready.accuracy), **ready.flops}
    for name, timer in ready.timers.items():
        low, middle, high = timer.quartiles()
        mean, se = timer.mean()
        values |= {name: middle, f"{name}_q1": low, f"{name}_q3": high, f"{name}_mean": mean, f"{name}_se": se}
        values[f"{name}_repeats"] = len(timer.samples)
    return values


def _package(entry: Entry) -> str:
    found = __version__ if entry.package == "cwy" else version(entry.package)
    return f"{entry.package} {found}".strip()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _told(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    if asked := re.search(r"DefaultCPUAllocator.*allocate (\d+) bytes", str(error)):
        more = f"out of memory on the CPU, asking for {int(asked[1]) / 1e6:.3g} MB"
        return f"{more} (where it can, the benchmark keeps back a tenth of what was free)"
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
