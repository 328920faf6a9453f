"""The harness: check every entry, then time those that passed, in turn."""

from __future__ import annotations

import gc
import re
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ... import __version__
from ..._provenance import version
from ...cudagraph import CapturedCall, CaptureError
from ..output.rows import Context, Measurement, Status, Time
from ..suites import Size, how_to_install, show_size
from .check import Accuracy, CheckFailed, accuracy, alike, judge
from .entry import Case, Entry, Foreign, Skipped
from .flops import count
from .machine import bounded, peak
from .timing import FEWEST, Effort, Timer, clock, in_turn

Watch = Callable[[Size, str, float], object]
"""Called with a size, what is being done there, and which part of the work is finished."""


class TooSlow(Exception):
    """Report that one call takes longer than the limit."""


@dataclass(frozen=True)
class Plan:
    """Describe what to measure.

    Attributes:
        bench: the name of the benchmark.
        entries: ``entries(size)`` lists what is timed at a size.
        sizes: in growing order. An entry too slow at one is not tried at the next.
        wanted: whether an entry takes part.
        dtype: of the inputs.
        context: the device and seed, and what else rows carry.
        effort: how long to measure.
    """

    bench: str
    entries: Callable[[Size], Sequence[Entry]]
    sizes: Sequence[Size]
    wanted: Callable[[Entry], bool]
    dtype: torch.dtype
    context: Context
    effort: Effort

    @property
    def device(self) -> torch.device:
        """Return the device that is measured."""
        return torch.device(self.context.device)


@dataclass(frozen=True)
class Ready:
    """Hold an entry that passed its check.

    Attributes:
        timers: by kind of time.
        flops: operations by kind of time, where they were counted.
        ungraphed: by kind of time, why there is no CUDA graph.
    """

    entry: Entry
    dtype: torch.dtype
    accuracy: Accuracy
    memory: int
    flops: dict[str, int]
    timers: dict[str, Timer]
    ungraphed: dict[str, str]

    @property
    def complete(self) -> bool:
        """Return whether every kind of time has enough samples."""
        return all(len(timer.samples) >= FEWEST for timer in self.timers.values())


@dataclass(frozen=True)
class Untimed:
    """Hold why an entry has no time."""

    status: Status
    reason: str


def run(
    plan: Plan,
    found: list[Measurement],
    watch: Watch = lambda size, what, part: None,
) -> None:
    """Measure a benchmark.

    Args:
        plan: what to measure.
        found: where complete measurements go, also when the benchmark is interrupted.
        watch: called as the work goes on.
    """
    too_slow: dict[str, str] = {}
    begin = time.monotonic()
    limit = nullcontext()
    if plan.device.type == "cpu":
        limit = bounded()
    with limit, warnings.catch_warnings():
        # torch warns of copies of weights, and of the first product on a thread of autograd's.
        warnings.filterwarnings(
            "ignore", "RNN module weights are not part|Attempting to run cuBLAS"
        )
        for size in plan.sizes:
            # A size of which only a part fits would compare nothing: none of it is begun late.
            late = size != plan.sizes[0] and time.monotonic() > begin + plan.effort.total / 2
            end = begin
            if not late:
                end = begin + plan.effort.total
            entries = [entry for entry in plan.entries(size) if plan.wanted(entry)]
            session = _Session(plan, size, entries, end, too_slow, watch)
            try:
                session.check()
                session.time()
            finally:
                found.extend(session.measurements())


@dataclass
class _Session:
    """Do the work at one size.

    Attributes:
        end: the moment after which no entry is begun.
        too_slow: by entry, why it is not tried at larger sizes. Sessions share it.
    """

    plan: Plan
    size: Size
    entries: Sequence[Entry]
    end: float
    too_slow: dict[str, str]
    watch: Watch
    ready: dict[str, Ready] = field(default_factory=dict)
    untimed: dict[str, Untimed] = field(default_factory=dict)

    def check(self) -> None:
        """Check every entry that can take part."""
        gc.collect()
        for i, entry in enumerate(self.entries):
            self.watch(self.size, f"checking {entry.name}", i / len(self.entries) / 2)
            refused = self._refused(entry)
            if refused is None:
                self._prepare(entry)
            else:
                self.untimed[entry.name] = refused

    def time(self) -> None:
        """Time the entries that passed, in turn."""
        self.watch(self.size, "timing in turn", 0.5)
        timers = [timer for one in self.ready.values() for timer in one.timers.values()]
        total = sum(timer.repeats for timer in timers)
        for taken in in_turn(timers):
            self.watch(self.size, "timing in turn", (1 + taken / total) / 2)
            complete = all(one.complete for one in self.ready.values())
            if complete and time.monotonic() > self.end:
                break

    def measurements(self) -> list[Measurement]:
        """Return what is complete, in the order of the entries."""
        found = []
        for entry in self.entries:
            ready = self.ready.get(entry.name)
            if entry.name in self.untimed:
                untimed = self.untimed[entry.name]
                found.append(self._measurement(entry, self.plan.dtype, **asdict(untimed)))
            elif ready is not None and ready.complete:
                found.append(self._measured(ready))
        return found

    def _refused(self, entry: Entry) -> Untimed | None:
        """Return why an entry does not take part at this size, None if it does."""
        missing = why_missing(entry.package)
        if missing:
            return Untimed("missing", missing)
        refused = entry.why_not(self.plan.dtype, self.plan.device)
        if refused:
            return Untimed("skipped", refused)
        if entry.name in self.too_slow:
            return Untimed("skipped", self.too_slow[entry.name])
        if time.monotonic() > self.end:
            return Untimed("skipped", f"the {self.plan.effort.total:g} s for all were over")
        return None

    def _prepare(self, entry: Entry) -> None:
        try:
            self.ready[entry.name] = prepare(entry, self.plan)
        except TooSlow as slow:
            reason = f"{slow} at {show_size(self.size)}, "
            reason += f"above the limit of {self.plan.effort.limit:g} s"
            self.too_slow[entry.name] = reason
            self.untimed[entry.name] = Untimed("skipped", reason)
        except Skipped as why:
            self.untimed[entry.name] = Untimed("skipped", str(why))
        except CheckFailed as wrong:
            self.untimed[entry.name] = Untimed("failed", str(wrong))
        except Exception as error:
            self.untimed[entry.name] = Untimed("failed", _in_one_line(error))
            # Its frames hold memory that the next entry may need.
            error.__traceback__ = None
            gc.collect()

    def _measurement(self, entry: Entry, dtype: torch.dtype, **given: Any) -> Measurement:
        return Measurement(
            bench=self.plan.bench,
            entry=entry.name,
            group=entry.group,
            about=entry.about,
            size=show_size(self.size),
            dtype=str(dtype).removeprefix("torch."),
            package=_with_version(entry.package),
            context=self.plan.context,
            **given,
        )

    def _measured(self, ready: Ready) -> Measurement:
        return self._measurement(
            ready.entry,
            ready.dtype,
            status="ok",
            times={
                kind: _time(timer, ready.flops.get(kind)) for kind, timer in ready.timers.items()
            },
            ungraphed=ready.ungraphed,
            memory=ready.memory,
            **asdict(ready.accuracy),
        )


def why_missing(package: str) -> str | None:
    """Return how to install a package that is not there, None if it is."""
    if find_spec(package):
        return None
    return f"{package} is not installed: {how_to_install(package)}"


class _Calls:
    """Hold the calls that are timed, all on the same inputs."""

    def __init__(self, entry: Entry, case: Case) -> None:
        self.entry = entry
        self.function = case.call
        self.leaves = [x.detach().requires_grad_() for x in case.inputs]
        self.cotangent = torch.empty(0)
        """The gradient of the result, drawn once its shape is known."""

    def forward(self) -> Tensor:
        with torch.no_grad(), self.entry.within():
            return self.function(*self.leaves)

    def both(self) -> tuple[Tensor, ...]:
        with self.entry.within():
            out = self.function(*self.leaves)
            return torch.autograd.grad(out, self.leaves, self.cotangent)

    def inline(self) -> tuple[Tensor, ...]:
        with torch.autograd.set_multithreading_enabled(False):
            return self.both()


def prepare(entry: Entry, plan: Plan) -> Ready:
    """Check an entry, and make its timers.

    It makes the entry's inputs, runs it once, checks it against float64, measures its memory,
    captures it in CUDA graphs and sizes its samples.
    """
    device = plan.device
    effort = plan.effort
    generators = []
    if device.type == "cuda":
        generators = [device]
    with torch.random.fork_rng(devices=generators):
        torch.manual_seed(plan.context.seed)
        case = entry.make(plan.dtype, device)
        if case.foreign is not None:
            return _prepare_foreign(entry, case, case.foreign, plan)
        calls = _Calls(entry, case)
        out = _first(calls.forward, device, effort.limit, "forward")
        calls.cotangent = torch.randn_like(out)
        gradients = None
        if entry.differentiable:
            gradients = _first(calls.both, device, effort.limit, "forward + backward")
        errors = accuracy(case, out, calls.cotangent, gradients)
    gate = entry.gate or out.dtype
    judge(errors, gate)

    whole: Callable[[], object] = calls.forward
    if entry.differentiable:
        whole = calls.both
    memory: list[int] = []
    seconds = clock(lambda: memory.append(peak(whole, device)), device)
    forward_seconds = seconds
    if entry.differentiable:
        forward_seconds = 0.0  # not known: the call that was timed has a backward pass

    timers = {"forward": Timer(calls.forward, device)}
    timers["forward"].calibrate(effort, forward_seconds)
    expected: dict[str, Any] = {"forward": out}
    if entry.differentiable:
        timers["both"] = Timer(calls.both, device)
        timers["both"].calibrate(effort, seconds)
        expected["both"] = gradients
    if entry.differentiable and device.type == "cuda":
        timers["both_inline"] = Timer(calls.inline, device)
        timers["both_inline"].calibrate(effort, seconds)

    ungraphed: dict[str, str] = {}
    if effort.graphs and device.type == "cuda":
        for kind, result in expected.items():
            graph = _graph(timers[kind].call, result, device, gate)
            if isinstance(graph, str):
                ungraphed[f"{kind}_graph"] = graph
            else:
                timers[f"{kind}_graph"] = graph
                graph.calibrate(effort)
    flops: dict[str, int] = {}
    if effort.counts:
        flops = count(entry, case, plan.dtype)
    return Ready(entry, out.dtype, errors, memory[0], flops, timers, ungraphed)


def _prepare_foreign(entry: Entry, case: Case, foreign: Foreign, plan: Plan) -> Ready:
    """Check an entry of another library, and make its timers."""
    device = plan.device
    effort = plan.effort

    def forward() -> tuple[Tensor, ...]:
        return foreign.tensors(foreign.forward())

    def both() -> tuple[Tensor, ...]:
        return foreign.tensors(foreign.both())

    (out,) = _first(forward, device, effort.limit, "forward")
    cotangent = torch.randn_like(out)
    foreign.receive(cotangent)
    gradients = _first(both, device, effort.limit, "forward + backward")
    errors = accuracy(case, out, cotangent, gradients)
    judge(errors, out.dtype)
    blocked = {
        "forward": lambda: foreign.wait(foreign.forward()),
        "both": lambda: foreign.wait(foreign.both()),
    }
    timers = {kind: Timer(call, device, wait=foreign.wait) for kind, call in blocked.items()}
    if device.type == "cuda":
        # On a CPU calls that do not wait would run at once, and get in each other's way.
        timers["forward"] = Timer(foreign.forward, device, wait=foreign.wait)
        timers["both"] = Timer(foreign.both, device, wait=foreign.wait)
        timers["both_blocked"] = Timer(blocked["both"], device, wait=foreign.wait)
    if foreign.repetitions:
        repeated = Timer(foreign.repeated, device, wait=foreign.wait, inner=foreign.repetitions)
        timers["both_repeated"] = repeated
    for timer in timers.values():
        timer.calibrate(effort)
    return Ready(entry, out.dtype, errors, foreign.memory, {}, timers, {})


def _graph(
    call: Callable[[], Any], expected: Any, device: torch.device, gate: torch.dtype
) -> Timer | str:
    """Return a timer of a call as a CUDA graph, or the reason why it cannot be captured."""
    try:
        with torch.cuda.device(device):
            captured = CapturedCall(call)
            captured.replay()
    except CaptureError as error:
        return str(error)
    if not alike(captured.outputs, expected, gate):
        return "its replay gives another result than the plain call"
    return Timer(captured.replay, device)


def _first(call: Callable[[], Any], device: torch.device, limit: float, what: str) -> Any:
    """Return the result of a call, unless it is too slow."""
    results = []
    seconds = clock(lambda: results.append(call()), device)
    if limit < seconds < 5 * limit:
        # Code that loads on first use may have made it slow.
        seconds = clock(call, device)
    if seconds > limit:
        raise TooSlow(f"one {what} took {seconds:.2g} s")
    return results[0]


def _time(timer: Timer, flops: int | None) -> Time:
    low, middle, high = timer.quartiles()
    mean, error = timer.mean()
    return Time(
        median=middle,
        q1=low,
        q3=high,
        mean=mean,
        se=error,
        repeats=len(timer.samples),
        flops=flops,
    )


def _with_version(package: str) -> str:
    found = version(package)
    if package == "cwy":
        found = __version__
    return f"{package} {found}".strip()


def _in_one_line(error: Exception) -> str:
    asked = re.search(r"DefaultCPUAllocator.*allocate (\d+) bytes", str(error))
    if asked:
        return (
            f"out of memory on the CPU, asking for {int(asked[1]) / 1e6:.3g} MB "
            "(where it can, the benchmark keeps back a tenth of what was free)"
        )
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])
