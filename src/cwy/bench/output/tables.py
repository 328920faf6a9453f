"""The results in words and tables, for a terminal of 80 columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..suites import BENCHES, Size, show_size
from .rows import KINDS, Measurement, Time

STYLES = {"ours": "bold", "peer": "", "floor": "dim"}


@dataclass(frozen=True)
class Last:
    """Hold the measurements at the largest size of a benchmark.

    Attributes:
        baseline: the entry that the others are compared with.
        found: the measurements.
    """

    baseline: str
    found: Sequence[Measurement]

    @property
    def base(self) -> float | None:
        """Return the seconds of the baseline, None if it has no time."""
        return next((one.ranked for one in self.found if one.entry == self.baseline), None)


def overview(found: Sequence[Measurement], sizes: Sequence[Size], kind: str = "both") -> Table:
    """Show one kind of time at every size, the fastest entry at the largest size first."""
    names = [show_size(size) for size in sizes]
    timed: dict[tuple[str, str], Measurement] = {}
    times: dict[tuple[str, str], float] = {}
    for one in found:
        time = one.standing(kind)
        if time is not None:
            timed[one.entry, one.size] = one
            times[one.entry, one.size] = time.median
    ranked = sorted(times, key=lambda place: (place[1] != names[-1], times[place]))
    title = f"{KINDS[kind]}, ms"
    if kind in ("forward", "both") and are_steps(found):
        title = "A step, ms"
    view = blank(title, "entry", *_headings(names))
    for entry in dict.fromkeys(entry for entry, _ in ranked):
        first = next(timed[entry, name] for name in names if (entry, name) in timed)
        cells = [_or(times.get((entry, name)), ms) for name in names]
        view.add_row(marked(first), *cells, style=STYLES[first.group])
    return view


def are_steps(found: Sequence[Measurement]) -> bool:
    """Return whether each measurement is of a whole step, without a backward pass of its own."""
    return not any(one.seconds("both") for one in found)


def _headings(names: Sequence[str]) -> list[str]:
    """Break long sizes into a number per line where several would not fit."""
    if sum(len(name) + 1 for name in names) > 60:
        return [name.replace("x", "\nx") for name in names]
    return list(names)


def detail(found: Sequence[Measurement], baseline: str, steps: int | None = None) -> Table:
    """Show everything measured at one size, the fastest first, compared with the baseline.

    ``±`` is half the distance between the quartiles, relative to the median. With ``steps``, the
    last column is the time of one step, forward and backward. Else it is the orthogonality error.
    """
    timed = [one for one in found if one.seconds("forward")]
    timed.sort(key=lambda one: one.ranked or inf)
    base = next((one.ranked for one in timed if one.entry == baseline), None)
    headings = [
        "forward\nms",
        "fwd+bwd\nms",
        "±",
        f"×\n{baseline}".replace(", ", ",\n"),
        "peak\nMB",
        "error",
        "grad.\nerror",
        "orth.\nerror",
    ]
    if steps is not None:
        headings[-1] = "µs a\nstep"
    shown = range(len(headings))
    if are_steps(found):
        # Backward passes and orthogonality have no numbers of their own.
        headings[0] = "step\nms"
        shown = (0, 2, 3, 4, 5)
    view = blank(f"Size {found[0].size}", "entry", *[headings[i] for i in shown])
    for one in timed:
        both = one.seconds("both")
        cells = [
            _or(one.seconds("forward"), ms),
            _or(both, ms),
            _spread(one.standing("both")),
            _ratio(one.ranked, base),
            _or(one.memory, _megabytes),
            _or(one.error, _error),
            _or(one.gradient_error, _error),
            _or(one.orthogonality, _error),
        ]
        if steps is not None:
            cells[-1] = _or(both, lambda seconds: ms(seconds / steps * 1e3))
        view.add_row(marked(one), *[cells[i] for i in shown], style=STYLES[one.group])
    return view


def costs(found: Sequence[Measurement], formulas: Mapping[str, tuple[str, float]]) -> Table:
    """Show what the paper counts for a forward pass, what was counted, and what it takes.

    Each is also shown as a multiple of the least.
    """
    known = [one for one in found if one.entry in formulas and one.status == "ok"]
    known.sort(key=lambda one: one.flops("forward") or 0)
    view = blank(
        f"The paper's count at {found[0].size}",
        "entry",
        "formula",
        "Mflop",
        "×",
        "counted\nMflop",
        "×",
        "forward\nms",
        "×",
    )
    paper = _Column([formulas[one.entry][1] for one in known], _millions)
    counted = _Column([one.flops("forward") for one in known], _millions)
    times = _Column([one.seconds("forward") for one in known], ms)
    for i, one in enumerate(known):
        cells = [*paper.cells(i), *counted.cells(i), *times.cells(i)]
        view.add_row(marked(one), formulas[one.entry][0], *cells, style=STYLES[one.group])
    return view


@dataclass(frozen=True)
class _Column:
    """Hold values that are shown as they are and as multiples of the least."""

    values: Sequence[float | None]
    write: Callable[[float], str]

    def cells(self, row: int) -> tuple[str, str]:
        value = self.values[row]
        least = min((one for one in self.values if one), default=1)
        return _or(value, self.write), _or(value, lambda x: times(x / least))


def marked(one: Measurement) -> str:
    """Return the entry's name, and whether it is complex where others are real."""
    if one.dtype.startswith("complex"):
        return f"{one.entry} (complex)"
    return one.entry


def findings(found: Sequence[Measurement], baseline: str) -> str:
    """Describe what the times at one size show, in sentences that hold for these very numbers."""
    ours = next((one for one in found if one.entry == baseline), None)
    both = None
    if ours is not None:
        both = ours.seconds("both")
    if ours is not None and not both and ours.seconds("forward"):
        return _of_steps(found, ours)
    if ours is None or not both:
        return f"{baseline} has no time at {found[0].size}."
    words = f"At {ours.size}, {baseline} takes {ms(both)} ms forward + backward"
    words += _beside_the_floor(found, both)
    words += _share(found, ours)
    compared = rivals(found, baseline)
    if not compared:
        return f"{words}."
    ratios = sorted(((one.ranked or 0) / both, one.entry) for one in compared)
    faster = [_named(entry, ratio) for ratio, entry in ratios if ratio < 1]
    slower = [_named(entry, ratio) for ratio, entry in ratios if ratio >= 1]
    if faster:
        words += f". Faster: {', '.join(faster)}."
    else:
        words += ". No rival is faster."
    if slower:
        ends = dict.fromkeys([slower[0], slower[-1]])
        words += f" Slower: {' to '.join(ends)}."
    return words + _ahead_forward(compared, ours)


def _of_steps(found: Sequence[Measurement], base: Measurement) -> str:
    """Describe how long steps without a backward pass of their own take."""
    seconds = base.seconds("forward") or math.nan
    words = f"At {base.size}, a step of {base.entry} takes {ms(seconds)} ms"
    words += _beside_the_floor(found, seconds, "forward") + "."
    ours = [(one.seconds("forward"), one.entry) for one in found if one.group == "ours"]
    least, fastest = min((step or inf, entry) for step, entry in ours)
    if fastest == base.entry:
        return words
    return f"{words} The fastest of ours, {fastest}, takes {times(least / seconds)} times that."


def _beside_the_floor(found: Sequence[Measurement], time: float, kind: str = "both") -> str:
    for one in found:
        plain = one.seconds(kind)
        if one.group == "floor" and plain:
            return f", {times(time / plain)} times {one.entry}"
    return ""


def _ahead_forward(compared: Sequence[Measurement], ours: Measurement) -> str:
    """Name the rivals that are slower in all, but faster forward."""
    base = ours.seconds("forward")
    both = ours.seconds("both")
    ahead = []
    for one in compared:
        forward = one.seconds("forward")
        whole = one.seconds("both")
        if base and both and forward and whole and whole >= both and forward < base:
            ahead.append(_named(one.entry, forward / base))
    if not ahead:
        return ""
    return f" Faster only forward: {', '.join(ahead)}."


def _named(entry: str, ratio: float) -> str:
    return f"{entry} ({times(ratio)}×)"


def rivals(found: Sequence[Measurement], baseline: str) -> list[Measurement]:
    """Return what the baseline is compared with: peers and, between methods, other methods."""
    compared = [one for one in found if one.ranked and _is_rival(one, baseline)]
    names = {one.entry for one in compared}
    nonlinearity = baseline.rpartition(", ")[2]
    kept = []
    for one in compared:
        # An entry with another nonlinearity gives way to the one with the baseline's.
        alike = f"{one.entry.rpartition(', ')[0]}, {nonlinearity}"
        if one.entry == alike or alike not in names:
            kept.append(one)
    return kept


def _is_rival(one: Measurement, baseline: str) -> bool:
    if one.group == "peer":
        return True
    between = one.bench in BENCHES and BENCHES[one.bench].between
    return one.group == "ours" and between and _method(one.entry) != _method(baseline)


def rate(one: Measurement, kind: str) -> float | None:
    """Return the operations per second by one kind of time, None where either is not known."""
    work = one.flops(kind)
    seconds = one.seconds(kind)
    if work and seconds:
        return work / seconds
    return None


def product(found: Sequence[Measurement], ours: Measurement) -> Measurement | None:
    """Return the plain product of the same size whose operations are most nearly as many."""
    work = ours.flops("forward") or 0
    floors = [one for one in found if one.group == "floor" and one.size == ours.size]
    floors = [one for one in floors if one.flops("forward")]
    return min(floors, key=lambda one: abs((one.flops("forward") or 0) - work), default=None)


def untimed(found: Sequence[Measurement]) -> Text:
    """Show what has no time, or none as a CUDA graph, and why.

    Entries that share sizes and a reason share a line.
    """
    sizes: dict[tuple[str, str, str], list[str]] = {}
    for one in found:
        status = one.status
        reason = one.reason
        if status == "ok":
            status = "no CUDA graph"
            reason = _why_ungraphed(one)
        if reason:
            sizes.setdefault((status, reason, one.entry), []).append(one.size)
    shared: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for (status, reason, entry), places in sizes.items():
        if status == "missing":
            places = ()
        shared.setdefault((status, reason, tuple(places)), []).append(entry)
    everyone = len({one.entry for one in found})
    lines = []
    for (status, reason, places), entries in shared.items():
        who = ", ".join(entries)
        if len(entries) == everyone:
            who = "everything"
        where = ""
        if places:
            where = f" at {', '.join(places)}"
        lines.append(f"{status}: {who}{where}: {reason}.")
    return Text("\n".join(lines))


def _why_ungraphed(one: Measurement) -> str:
    """Return why a time as a CUDA graph is missing, and which, if only one is.

    The first reason is given, because an obstacle in the forward pass is one for both.
    """
    if not one.ungraphed:
        return ""
    kind, why = next(iter(one.ungraphed.items()))
    if not any(timed.endswith("_graph") for timed in one.times):
        return why
    if kind == "forward_graph":
        return f"only forward: {why}"
    return f"forward + backward: {why}"


def of_all(last: Mapping[str, Last]) -> Table:
    """Show every benchmark: ours at its largest size, and its fastest and slowest rival."""
    title = "Forward + backward, at the largest size timed"
    view = blank(title, "benchmark", "ours", "fastest rival", "slowest rival")
    for name, one in last.items():
        cells = [f"{one.baseline}\n–"]
        base = one.base
        if base is not None:
            cells = [f"{one.baseline}\n{ms(base)} ms"]
            compared = rivals(one.found, one.baseline)
            ratios = sorted(((rival.ranked or 0.0) / base, rival.entry) for rival in compared)
            ends = [f"{entry}\n{times(ratio)}×" for ratio, entry in ratios]
            cells += [*ends[:1], *ends[-1:]] or ["–", "–"]
        view.add_row(f"{name}\n{one.found[0].size}", *cells)
    return view


def ratios(last: Last) -> list[tuple[str, float]]:
    """Return each entry's group, and its time as a multiple of ours. Peers are rivals only."""
    base = last.base
    peers = rivals(last.found, last.baseline)
    shown = [one for one in last.found if one.group != "peer" or one in peers]
    return [(one.group, one.ranked / base) for one in shown if base and one.ranked]


def blank(title: str, first: str, *headings: str) -> Table:
    """Return a table without rows, its first column to the left."""
    view = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    view.add_column(first, justify="left", no_wrap=True)
    for heading in headings:
        view.add_column(heading, justify="right", no_wrap=True)
    return view


def _method(entry: str) -> str:
    return entry.replace(",", " ").split()[0]


def _share(found: Sequence[Measurement], ours: Measurement) -> str:
    """Give the rate of ours as a share of a plain product's, as graphs where both are."""
    floor = product(found, ours)
    if floor is None:
        return ""
    for kind in ("both_graph", "both", "forward_graph", "forward"):
        mine = rate(ours, kind)
        plain = rate(floor, kind)
        if mine and plain:
            title = KINDS[kind][0].lower() + KINDS[kind][1:]
            return f", at {mine / plain:.0%} of the rate of {floor.entry} ({title})"
    return ""


def _spread(time: Time | None) -> str:
    if time is None or time.q1 is None or time.q3 is None or not time.median:
        return ""
    return f"{(time.q3 - time.q1) / 2 / time.median:.0%}"


def _ratio(theirs: float | None, ours: float | None) -> str:
    if ours and theirs:
        return times(theirs / ours)
    return "–"


def times(ratio: float) -> str:
    """Write a ratio with two digits, or without decimals.

    Example:
        >>> times(0.0345), times(3.45), times(345.6)
        ('0.035', '3.5', '346')
    """
    if ratio >= 99.5:
        return f"{ratio:.0f}"
    return f"{ratio:#.2g}".rstrip(".")


def ms(duration: float) -> str:
    """Write milliseconds with three digits.

    Example:
        >>> ms(0.0123456), ms(12.3456)
        ('12.3', '12346')
    """
    value = duration * 1e3
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:#.3g}".rstrip(".")


def _or(value: float | None, write: Callable[[float], str]) -> str:
    if value is None:
        return "–"
    return write(value)


def _megabytes(size: float) -> str:
    if size < 1e5:
        return "<0.1"
    if size < 1e9:
        return f"{size / 1e6:.3g}"
    return f"{size / 1e6:.0f}"


def _millions(count: float) -> str:
    value = count / 1e6
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _error(value: float) -> str:
    if not value:
        return "0"
    return f"{value:.0e}".replace("e-0", "e-")
