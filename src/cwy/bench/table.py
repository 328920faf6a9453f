"""The results in words and tables, for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from . import BENCHES
from .rows import Row
from .sizes import Size, show

KINDS = {
    "forward": "Forward",
    "both": "Forward + backward",
    "both_inline": "Forward + backward in one thread",
    "forward_graph": "Forward as a CUDA graph",
    "both_graph": "Forward + backward as a CUDA graph",
}
"""The times of a row, by their fields."""
STYLES = {"ours": "bold", "peer": "", "floor": "dim"}


def overview(rows: Sequence[Row], sizes: Sequence[Size], kind: str = "both") -> Table:
    """One kind of time at every size, a row an entry, the fastest at the largest size first."""
    of = lambda row: getattr(row, field(row, kind))
    timed = {(row.entry, row.size): row for row in rows if of(row)}
    # A number a line where several long sizes would not fit.
    long = sum(len(show(size)) + 1 for size in sizes) > 60
    view = blank(f"{KINDS[kind]}, ms", "entry", *(show(size).replace("x", "\nx" if long else "x") for size in sizes))
    for name in _order(list(timed.values()), show(sizes[-1]), of):
        found = [timed.get((name, show(size))) for size in sizes]
        first = next(row for row in found if row)
        cells = (_or(of(row) if row else None, ms) for row in found)
        view.add_row(marked(first), *cells, style=STYLES[first.group])
    return view


def detail(rows: Sequence[Row], baseline: str, steps: int | None = None) -> Table:
    """Everything measured at one size, the fastest first, compared with the baseline.

    ``±`` is half the distance between the quartiles, relative to the median. With ``steps``, the last column is the time
    of one of them, forward and backward; else it is the orthogonality error.
    """
    timed = sorted((row for row in rows if row.forward), key=lambda row: seconds(row) or inf)
    reference = next((row for row in timed if row.entry == baseline), None)
    headings = ("forward\nms", "fwd+bwd\nms", "±", f"×\n{baseline}".replace(", ", ",\n"), "peak\nMB", "error", "grad.\nerror")
    view = blank(f"Size {rows[0].size}", "entry", *headings, "orth.\nerror" if steps is None else "µs a\nstep")
    for row in timed:
        low, high, middle = (
            (row.forward_q1, row.forward_q3, row.forward) if row.both is None else (row.both_q1, row.both_q3, row.both)
        )
        cells = [
            _or(row.forward, ms),
            _or(row.both, ms),
            "" if low is None or high is None or not middle else f"{(high - low) / 2 / middle:.0%}",
            _ratio(row, reference),
            _or(row.memory, lambda size: "<0.1" if size < 1e5 else f"{size / 1e6:.3g}" if size < 1e9 else f"{size / 1e6:.0f}"),
            *(_or(value, _error) for value in (row.error, row.gradient_error)),
            _or(row.orthogonality, _error) if steps is None else _or(row.both, lambda both: ms(both / steps * 1e3)),
        ]
        view.add_row(marked(row), *cells, style=STYLES[row.group])
    return view


def costs(rows: Sequence[Row], paper: Mapping[str, tuple[str, float]]) -> Table:
    """What the paper says that a forward pass costs, and what it does, each also as a multiple of the least."""
    found = sorted((row for row in rows if row.entry in paper and row.status == "ok"), key=lambda row: row.forward_flops or 0)
    view = blank(
        f"The paper's count at {rows[0].size}", "entry", "formula", "Mflop", "×", "counted\nMflop", "×", "forward\nms", "×"
    )
    columns = [[paper[row.entry][1] for row in found], [row.forward_flops for row in found], [row.forward for row in found]]
    least = [min((value for value in column if value), default=1) for column in columns]
    for row, *values in zip(found, *columns, strict=True):
        shown = (_millions, _millions, ms)
        cells = [
            cell
            for value, write, by in zip(values, shown, least, strict=True)
            for cell in (_or(value, write), _or(value, lambda x, by=by: times(x / by)))
        ]
        view.add_row(marked(row), paper[row.entry][0], *cells, style=STYLES[row.group])
    return view


def marked(row: Row) -> str:
    """The entry's name, and whether it is complex where others are real."""
    return f"{row.entry} (complex)" if row.dtype.startswith("complex") else row.entry


def findings(rows: Sequence[Row], baseline: str) -> str:
    """What the times at one size say, in sentences that hold for these very numbers."""
    ours = next((row for row in rows if row.entry == baseline and row.both), None)
    if ours is None or ours.both is None:
        return f"{baseline} has no time at {rows[0].size}."
    told = f"At {ours.size}, {baseline} takes {ms(ours.both)} ms forward + backward"
    floor = next((row for row in rows if row.group == "floor" and row.both), None)
    if floor and floor.both:
        told += f", {times(ours.both / floor.both)} times {floor.entry}"
    told += _share(rows, ours)
    found = rivals(rows, baseline)
    ratios = sorted(((seconds(row) or 0) / ours.both, row.entry) for row in found)
    named = [f"{name} ({times(ratio)}×)" for ratio, name in ratios]
    faster = sum(ratio < 1 for ratio, _ in ratios)
    if not named:
        return f"{told}."
    told += f". Faster: {', '.join(named[:faster])}." if faster else ". No rival is faster."
    slower = named[faster:]
    told += f" Slower: {f'{slower[0]} to {slower[-1]}' if slower[1:] else slower[0]}." if slower else ""
    slow = [row for row in found if row.both and row.both >= ours.both]
    ahead = [(row.entry, row.forward / ours.forward) for row in slow if row.forward and ours.forward]
    first = [f"{name} ({times(ratio)}×)" for name, ratio in ahead if ratio < 1]
    return f"{told} Faster forward alone: {', '.join(first)}." if first else told


def rivals(rows: Sequence[Row], baseline: str) -> list[Row]:
    """The timed rows that the baseline is compared with: peers and, where methods are compared, the other methods."""
    other = lambda row: row.bench in BENCHES and BENCHES[row.bench].between and _method(row.entry) != _method(baseline)
    found = [row for row in rows if seconds(row) and (row.group == "peer" or (row.group == "ours" and other(row)))]
    # Where there is one with the baseline's nonlinearity, those with others are not compared.
    alike = lambda row: f"{row.entry.rpartition(', ')[0]}, {baseline.rpartition(', ')[2]}"
    names = {row.entry for row in found}
    return [row for row in found if row.entry == alike(row) or alike(row) not in names]


def rate(row: Row, kind: str) -> float | None:
    """Operations a second, by one kind of time; None where either is not known."""
    work, duration = getattr(row, f"{kind.removesuffix('_graph')}_flops"), getattr(row, kind)
    return work / duration if work and duration else None


def product(rows: Sequence[Row], ours: Row) -> Row | None:
    """The plain product of the same size whose operations are most nearly as many."""
    work = ours.forward_flops or 0
    floors = [row for row in rows if row.group == "floor" and row.size == ours.size and row.forward and row.forward_flops]
    return min(floors, key=lambda row: abs((row.forward_flops or 0) - work), default=None)


def untimed(rows: Sequence[Row]) -> Text:
    """What got no time, or none as a CUDA graph, and why; entries that share sizes and a reason share a line."""
    sizes: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.reason:
            sizes.setdefault((row.status.replace("ok", "no CUDA graph"), row.reason, row.entry), []).append(row.size)
    told: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for (status, reason, entry), found in sizes.items():
        told.setdefault((status, reason, () if status == "missing" else tuple(found)), []).append(entry)
    everyone = len({row.entry for row in rows})
    lines = []
    for (status, reason, found), entries in told.items():
        who = "everything" if len(entries) == everyone else ", ".join(entries)
        where = f" at {', '.join(found)}" if found else ""
        lines.append(f"{status}: {who}{where}: {reason}.")
    return Text("\n".join(lines))


def blank(title: str, *headings: str) -> Table:
    """A table without rows, its first column to the left."""
    view = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=0, show_edge=False)
    for i, heading in enumerate(headings):
        view.add_column(heading, justify="right" if i else "left", no_wrap=True)
    return view


def field(row: Row, kind: str) -> str:
    """The field with a kind of time: a step on the manifold, which has no backward pass, stands with its forward one."""
    return kind.replace("both", "forward").removesuffix("_inline") if row.both is None else kind


def seconds(row: Row) -> float | None:
    """What an entry is ranked by: forward and backward, or what it has."""
    return getattr(row, field(row, "both"))


def _method(entry: str) -> str:
    return entry.replace(",", " ").split()[0]


def _share(rows: Sequence[Row], ours: Row) -> str:
    """The rate of ours as a share of a plain product's, by graphs where both have them."""
    floor = product(rows, ours)
    for kind in ("both_graph", "both", "forward_graph", "forward"):
        if floor and (mine := rate(ours, kind)) and (plain := rate(floor, kind)):
            return f", at {mine / plain:.0%} of the rate of {floor.entry} ({KINDS[kind][0].lower()}{KINDS[kind][1:]})"
    return ""


def _order(rows: Sequence[Row], last: str, of: Callable[[Row], float | None]) -> list[str]:
    """Entries by their time at the last size, then those that have none there."""
    ranked = sorted(rows, key=lambda row: (row.size != last, of(row)))
    return list(dict.fromkeys(row.entry for row in ranked))


def _ratio(row: Row, reference: Row | None) -> str:
    ours, theirs = seconds(reference) if reference else None, seconds(row)
    return times(theirs / ours) if ours and theirs else "–"


def times(ratio: float) -> str:
    """A ratio with two digits, or without decimals.

    Example:
        >>> times(0.0345), times(3.45), times(345.6)
        ('0.035', '3.5', '346')
    """
    return f"{ratio:.0f}" if ratio >= 99.5 else f"{ratio:#.2g}".rstrip(".")


def _or(value: float | None, write: Callable[[float], str]) -> str:
    return "–" if value is None else write(value)


def ms(duration: float) -> str:
    """Milliseconds with three digits.

    Example:
        >>> ms(0.0123456), ms(12.3456)
        ('12.3', '12346')
    """
    value = duration * 1e3
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}".rstrip(".")


def _millions(count: float) -> str:
    value = count / 1e6
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def _error(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-") if value else "0"
