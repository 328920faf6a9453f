"""``cwy bench advise``: which method, how many reflections and which backend are fastest here.

The question is about one size. An N x N weight is multiplied by a batch of B vectors or, with T
steps, is the transition of a recurrence. The time includes all that a training step computes: the
weight from its free parameters, and its use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from textwrap import indent

import torch
from rich.console import Console
from torch import Tensor

from .. import init, ops
from ..ops import dispatch
from ..ops._linalg import double
from ..ops.recurrence.nonlinearities import NONLINEARITIES
from ..ops.recurrence.spec import Request
from ..parametrizations import HR, OrthogonalMap
from ..parametrizations.reflections import ReflectionMap
from ..registry import Method
from . import Bench, Size
from .harness.entry import Case, Entry, gaussian
from .harness.timing import QUICK
from .output import tables
from .output.rows import Measurement, caption
from .runner import Options, find_device, find_dtype, near
from .suites.methods import Usage, listed, multiplies_without_q, serving, takes
from .suites.multiply import norm_error
from .suites.rnn import Lengths, draw_states, off_kinks, rollout, rollout_backends

EFFORT = replace(QUICK, total=120.0, limit=2.0, graphs=False)
FEWER = "16,32,64,128,256"
"""The numbers of reflections that are tried apart from all N."""
SMALLER = (
    "Fewer than N reflections (L=…) reach a smaller set of matrices, those that leave N - L "
    "dimensions unchanged. They may be faster, and they may learn less: compare both."
)
KEPT = 2**28
"""The most numbers that HR may keep for its gradient, an N x N matrix per reflection."""
FORMED = "Q formed"
WITHOUT_Q = "without Q"
FACTORS = "low rank"


@dataclass(frozen=True)
class Candidate:
    """Describe a way to use a method.

    Attributes:
        method: of the registry.
        reflections: how many, None for all.
        how: how it is multiplied.
        backend: of the recurrence, empty for a product.
    """

    method: Method
    reflections: int | None
    how: str
    backend: str = ""

    @property
    def name(self) -> str:
        """Return the name of the entry."""
        name = self.method.name
        if self.reflections:
            name += f" L={self.reflections}"
        return ", ".join(part for part in (name, self.how, self.backend) if part)

    @property
    def options(self) -> dict[str, int]:
        """Return the options of the method."""
        if self.reflections:
            return {"reflections": self.reflections}
        return {}

    def code(self, size: Size, nonlinearity: str, dtype: torch.dtype, device: torch.device) -> str:
        """Write how a user asks for it."""
        n = size[0]
        options = listed(self.options)
        like = ""
        if dtype != torch.float32:
            like += f", dtype={dtype}"
        if device.type != "cpu":
            like += f", device={str(device)!r}"
        if self.how == WITHOUT_Q:
            return (
                f"chart = cwy.METHODS[{self.method.name!r}].build({n}{options}{like})\n"
                "free = torch.nn.Parameter(chart.sample())\n"
                "y = chart.multiply(free, x)"
            )
        given = f"method={self.method.name!r}{options}"
        if len(size) == 2:
            return f"cwy.orthogonal(torch.nn.Linear({n}, {n}{like}), {given})"
        return (
            f"cwy.nn.OrthogonalRNN(inputs, {n}, nonlinearity={nonlinearity!r}, {given}, "
            f"backend={self.backend!r}{like})"
        )

    def served(self, size: Size, dtype: torch.dtype, device: torch.device) -> str:
        """Name the backend of the op ``wy`` that multiplies its reflections, empty without one."""
        if not issubclass(self.method.build, ReflectionMap):
            return ""
        # Half precision is computed in float32.
        inner = torch.promote_types(dtype, torch.float32)
        v = torch.empty(size[0], self.reflections or size[0], dtype=inner, device=device)
        wanted = "auto"
        if issubclass(self.method.build, HR):
            wanted = "reference"
        module = dispatch.choose("wy", wanted, v)
        return next(one.name for one in dispatch.backends("wy")["wy"] if one.module is module)


def candidates(size: Size, reflections: Sequence[int]) -> list[Candidate]:
    """List every real square method, with all reflections and with fewer, by each way to use it."""
    n = size[0]
    found = []
    for method in serving(n, n).values():
        if not method.real or method.name == "tcwy":
            continue
        counts: list[int | None] = [None]
        if takes(method, "reflections"):
            counts += [count for count in reflections if count < n]
        for count in counts:
            found += _ways(method, size, count)
    return found


def _ways(method: Method, size: Size, count: int | None) -> list[Candidate]:
    """List the ways to use a method. HR forms Q only while it keeps little."""
    n = size[0]
    ways = []
    if method.name != "hr" or n * n * (count or n) <= KEPT:
        ways.append(FORMED)
    if len(size) == 2:
        if multiplies_without_q(method):
            ways.append(WITHOUT_Q)
        return [Candidate(method, count, how) for how in ways]
    if method.name == "cwy" and count:
        ways.append(FACTORS)
    served = [one.name for one in rollout_backends() if one.name != "reference"]
    return [Candidate(method, count, how, backend) for how in ways for backend in served]


def entries(size: Size, nonlinearity: str, reflections: Sequence[int]) -> list[Entry]:
    """List a free weight as the floor, and every candidate."""
    found = [_entry(one, size, nonlinearity) for one in candidates(size, reflections)]
    return [_free(size, nonlinearity), *found]


def _entry(one: Candidate, size: Size, f: str) -> Entry:
    entry = Entry(
        one.name,
        f"cwy.METHODS[{one.method.name!r}], from its free parameters",
        partial(_product, one, size),
        group="ours",
        method=one.method.name,
        package="cwy",
    )
    if len(size) == 2:
        return entry
    given = _lengths(size)
    return replace(
        entry,
        make=partial(_recurrence, one, given, f),
        why_not=partial(_why_not, one, given, f),
    )


def _lengths(size: Size) -> Lengths:
    n, batch, steps = size
    return Lengths(n, None, batch, steps)


def _product(one: Candidate, size: Size, dtype: torch.dtype, device: torch.device) -> Case:
    n, batch = size
    x = gaussian(batch, n, dtype=dtype, device=device)
    use = _formed
    if one.how == WITHOUT_Q:
        use = lambda chart: chart.multiply
    usage = Usage(one.method, n, n, use, partial(norm_error, x), one.options)
    return usage.case(dtype, device, x)


def _recurrence(
    one: Candidate, given: Lengths, f: str, dtype: torch.dtype, device: torch.device
) -> Case:
    n = given.units
    found = Usage(one.method, n, n, lambda chart: chart, options=one.options).case(dtype, device)
    x, h0, b = draw_states(given, f, dtype, device)
    with torch.no_grad():
        q = found.truth(*map(double, found.inputs))
        off_kinks(f, x, h0, [q], b)
    timed = _Rollout(one.how, f, one.backend, found.call, h0, b)
    truth = _Rollout(one.how, f, "torch", found.truth, double(h0), double(b))
    return Case(timed, (*found.inputs, x), truth, None)


def _why_not(
    one: Candidate, given: Lengths, f: str, dtype: torch.dtype, device: torch.device
) -> str | None:
    backend = next(found for found in rollout_backends() if found.name == one.backend)
    factors = None
    if one.how == FACTORS:
        factors = one.reflections
    request = Request(given.units, given.batch, given.steps, dtype, device.type, f, factors)
    return backend.why_not(request)


def _free(size: Size, f: str) -> Entry:
    about = "the same with a free N x N weight"
    if len(size) == 2:
        return Entry("free weight", about, partial(_free_product, size), group="floor")
    make = partial(_free_recurrence, _lengths(size), f)
    return Entry("free weight", about, make, group="floor")


def _free_product(size: Size, dtype: torch.dtype, device: torch.device) -> Case:
    n, batch = size
    call = lambda w, x: x @ w.mT
    weight = gaussian(n, n, dtype=dtype, device=device)
    x = gaussian(batch, n, dtype=dtype, device=device)
    return Case(call, (weight, x), call, None)


def _free_recurrence(given: Lengths, f: str, dtype: torch.dtype, device: torch.device) -> Case:
    q = init.haar(given.units, dtype=dtype, device=device)
    x, h0, b = draw_states(given, f, dtype, device)
    x = off_kinks(f, x, h0, [q], b)
    same = lambda q: q
    timed = _Rollout(FORMED, f, "auto", same, h0, b)
    truth = _Rollout(FORMED, f, "auto", same, double(h0), double(b))
    return Case(timed, (q, x), truth, None)


def _formed(chart: OrthogonalMap) -> Callable[..., Tensor]:
    def call(*given: Tensor) -> Tensor:
        *free, x = given
        return x @ chart(*free).mT

    return call


@dataclass(frozen=True)
class _Rollout:
    """Run a recurrence from the free parameters and x."""

    how: str
    nonlinearity: str
    backend: str
    chart: Callable[..., Tensor]
    h0: Tensor
    bias: Tensor

    def __call__(self, *given: Tensor) -> Tensor:
        *free, x = given
        if self.how == FACTORS:
            transition = ops.wy_factors(free[0])
        else:
            transition = self.chart(*free)
        states = rollout(x, self.h0, transition, self.bias, self.nonlinearity, self.backend)
        # Factors are float32 where the vectors are half as wide.
        return states.to(x.dtype)


@dataclass(frozen=True)
class Question:
    """Hold the options of ``cwy bench advise`` as the user wrote them."""

    n: int
    batch: int = 64
    steps: int | None = None
    nonlinearity: str | None = None
    reflections: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    threads: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Asked:
    """Hold the question, checked. ``options`` are those of the benchmark that answers it."""

    size: Size
    nonlinearity: str
    reflections: tuple[int, ...]
    options: Options

    @property
    def steps(self) -> int | None:
        """Return the steps of a recurrence, or None for a product."""
        if len(self.size) == 2:
            return None
        return self.size[2]


def ask(question: Question) -> Asked:
    """Check a question. A mistake raises ValueError with what to do."""
    if question.nonlinearity is not None and question.steps is None:
        raise ValueError(
            "--nonlinearity: only a recurrence has one. Give its steps, too: --steps 100."
        )
    f = question.nonlinearity or "modrelu"
    if f not in NONLINEARITIES:
        raise ValueError(f"--nonlinearity: {f!r} is not known. {near(f, list(NONLINEARITIES))}")
    size: Size = (question.n, question.batch)
    what = "A product with a batch of vectors. Methods, reflections and backends."
    if question.steps is not None:
        size = (question.n, question.batch, question.steps)
        what = f"A recurrence over {question.steps} steps, {f}. Methods, reflections and backends."
    counts = _counts(question)
    dtype = find_dtype(question.dtype)
    device = find_device(question.device)
    options = Options(
        bench=Bench("advise", what, ("NxB", "NxBxT"), "", "", counts=False),
        entries=partial(entries, nonlinearity=f, reflections=counts),
        sizes=[size],
        wanted=lambda entry: entry.why_not(dtype, device) is None,
        device=device,
        dtype=dtype,
        effort=EFFORT,
        threads=question.threads,
        seed=question.seed,
        command="",
    )
    return Asked(size, f, counts, options)


def tell(
    asked: Asked, found: Sequence[Measurement], console: Console, stopped: bool = False
) -> None:
    """Show the table, what got no time and why, and the advice."""
    ranked = ranking(found)
    if not ranked:
        console.print("No candidate was timed: there is nothing to advise.")
        return
    if stopped:
        tried = [one for one in asked.options.entries(asked.size) if asked.options.wanted(one)]
        console.print(
            f"Stopped: {len(found)} of {len(tried)} were timed. The advice covers only those.\n"
        )
    if any(" L=" in one.entry for one in ranked):
        console.print(SMALLER, end="\n\n")
    console.print(tables.detail(found, ranked[0].entry, asked.steps), end="\n\n")
    untimed = tables.untimed(found)
    if untimed:
        console.print(untimed, end="\n\n")
    if any(one.seconds("both_inline") for one in found):
        console.print(tables.overview(found, [asked.size], "both_inline"), end="\n\n")
    for line in advice(asked, found).splitlines():
        # Code stays in one piece.
        console.print(line, soft_wrap=line.startswith(" "))
    console.print(caption(ranked[0].context, ranked[0].dtype), style="dim")


PICKS: dict[str, Callable[[Candidate], bool]] = {
    "Fastest with all reflections": lambda one: one.reflections is None,
    "Fastest": lambda one: True,
    "Fastest as the weight of a layer, which forms Q": lambda one: one.how != WITHOUT_Q,
}
"""The advice names the fastest candidate of each kind."""


def advice(asked: Asked, found: Sequence[Measurement]) -> str:
    """Name the fastest candidates, of all and of some kinds, and how to ask for them."""
    known = {one.name: one for one in candidates(asked.size, asked.reflections)}
    ranked = ranking(found)
    lines: list[str] = []
    named: set[str] = set()
    for title, fits in PICKS.items():
        fitting = [one for one in ranked if fits(known[one.entry])]
        if not fitting:
            continue
        fastest = fitting[0]
        candidate = known[fastest.entry]
        if fastest.entry in named:
            lines.append(f"{title}: {fastest.entry}, as above.")
            continue
        named.add(fastest.entry)
        words = f"{title}: {_described(asked, candidate, fastest, found)}"
        words += _ties(fastest, fitting)
        if candidate.reflections:
            words += f" It reaches only products of {candidate.reflections} reflections."
        code = candidate.code(
            asked.size, asked.nonlinearity, asked.options.dtype, asked.options.device
        )
        lines.append(f"{words}\n{indent(code, '    ')}")
    lines += _in_one_thread(ranked)
    return "\n".join(lines)


def _described(
    asked: Asked, candidate: Candidate, one: Measurement, found: Sequence[Measurement]
) -> str:
    """Give a candidate's time, compared with a free weight, and the backend that serves it."""
    both = one.seconds("both") or 0.0
    words = f"{one.entry}, {tables.ms(both)} ms forward + backward"
    free = next((floor.seconds("both") for floor in found if floor.group == "floor"), None)
    if free:
        words += f", {tables.times(both / free)} times a free weight"
    served = ""
    if asked.steps is None:
        served = candidate.served(asked.size, asked.options.dtype, asked.options.device)
    if served:
        words += f", by the backend {served!r} of wy"
    return f"{words}."


def _ties(fastest: Measurement, fitting: Sequence[Measurement]) -> str:
    """Name the candidates whose quartiles overlap with those of the fastest."""
    high = fastest.times["both"].q3 or 0
    level = [one.entry for one in fitting[1:] if (one.times["both"].q1 or inf) <= high]
    if not level:
        return ""
    return f" Its quartiles overlap with those of {'; '.join(level)}."


def _in_one_thread(ranked: Sequence[Measurement]) -> list[str]:
    """Report if the backward pass is clearly faster without autograd's own thread."""
    timed = [one for one in ranked if one.seconds("both_inline")]
    if not timed:
        return []
    fastest = min(timed, key=lambda one: one.seconds("both_inline") or inf)
    inline = fastest.seconds("both_inline") or inf
    if inline >= 0.8 * (ranked[0].seconds("both") or 0.0):
        return []
    return [
        "In one thread, with torch.autograd.set_multithreading_enabled(False), the fastest is "
        f"{fastest.entry}, {tables.ms(inline)} ms: autograd's own thread costs more than it gains."
    ]


def ranking(found: Sequence[Measurement]) -> list[Measurement]:
    """Return the candidates that have a time, the fastest first."""
    timed = [one for one in found if one.group == "ours" and one.seconds("both")]
    return sorted(timed, key=lambda one: one.seconds("both") or 0.0)


def _counts(question: Question) -> tuple[int, ...]:
    """Read ``--reflections``. The default numbers may be above N, those asked for may not."""
    text = question.reflections or FEWER
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"--reflections: {text!r} is not a list of whole numbers, as in '16,64'.")
    counts = sorted({int(part) for part in parts})
    n = question.n
    if question.reflections is not None and counts[-1] > n:
        raise ValueError(
            f"--reflections: {counts[-1]} is above N = {n}. Give numbers from 1 to {n}."
        )
    return tuple(count for count in counts if count < n)
