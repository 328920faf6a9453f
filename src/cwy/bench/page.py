"""The Benchmarks page of the documentation, made of committed rows: nothing on it that no row says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from math import inf
from pathlib import Path

from rich.table import Table

from . import BENCHES, figure, table
from .rows import Row, read_csv
from .sizes import Size, parse_sizes, show

Rows = list[Row]


def records(folder: Path, bench: str) -> dict[str, Rows]:
    """The rows of a benchmark by machine: those of ``folder/<machine>/<bench>.csv``."""
    return {path.parent.name: read_csv(path) for path in sorted(folder.glob(f"*/{bench}.csv"), reverse=True)}


def section(folder: Path, bench: str) -> str:
    """What was measured of a benchmark, in Markdown: on each machine a picture, times, and who was faster at every size."""
    told = []
    for machine, rows in records(folder, bench).items():
        told.append(f"### {_machine(rows)}")
        for form, sizes, found in _by_form(bench, rows):
            last = show(sizes[-1])
            title = f"{BENCHES[bench].about.rstrip('.')}, on {_machine(rows)}"
            where = picture(machine, bench, form)
            told.append(f'<a href="{where}"><img src="{where}" alt="{title}"></a>')
            kinds = [kind for kind in table.KINDS if any(getattr(row, kind) for row in found)]
            told += [markdown(table.overview(found, sizes, kind)) for kind in kinds]
            at = {show(size): [row for row in found if row.size == show(size)] for size in sizes}
            told.append(
                "\n".join(
                    f"- {table.findings(there, _baseline(bench, size, rows))}"
                    for size, there in zip(sizes, at.values(), strict=True)
                )
            )
            if paper := getattr(import_module(f".{bench}", __package__), "paper", None):
                told.append(markdown(table.costs(at[last], paper(sizes[-1]))))
        if any(row.reason for row in rows):
            told.append("Without a time:\n\n" + "\n".join(f"- {line}" for line in table.untimed(rows).plain.splitlines()))
        told.append(f"<small>{figure.caption(rows[0])}; rows: `results/bench/{machine}/{bench}.csv`</small>")
    return "\n\n".join(told) if told else f"No record yet: `cwy bench {bench}`."


def draw(folder: Path, site: Path) -> None:
    """The pictures that :func:`section` shows."""
    for bench in BENCHES:
        for machine, rows in records(folder, bench).items():
            for form, sizes, found in _by_form(bench, rows):
                path = site / picture(machine, bench, form)
                path.parent.mkdir(parents=True, exist_ok=True)
                about = BENCHES[bench].about.rstrip(".")
                figure.draw(found, sizes, form, about, _baseline(bench, sizes[-1], rows), path, _means(bench, found))


def picture(machine: str, bench: str, form: str) -> str:
    """Where a picture lies, from the root of the site."""
    return f"benchmarks/{machine}/{bench}-{form}.png"


CLAIMS = {
    "The exponential takes 10 to 1000 times as long as CWY": ("figure1c", ("exponential", "exponential, no sync")),
    "The Cayley map takes 10 to 1000 times as long as CWY": ("figure1c", ("cayley", "cayley, no sync")),
    "HR takes 20 times as long as CWY": ("figure2", ("HR, abs",)),
}
"""What the paper says of times: by which benchmark it can be seen, and of which rivals; a CUDA graph can hold the last."""


def claims(folder: Path) -> str:
    """Each of the paper's claims beside what was measured, in Markdown; of a machine without rows nothing is said."""
    lines = [
        "| the paper | measured on | sizes | forward | forward + backward | the rival wins at |",
        "|---|---|---|---|---|---|",
    ]
    for claim, (bench, names) in CLAIMS.items():
        for rows in records(folder, bench).values():
            for _, sizes, found in _by_form(bench, rows):
                kinds = {"forward": "", "both": "", "both_inline": " in one thread"}
                kinds |= dict.fromkeys(("forward_graph", "both_graph"), " as graphs")
                ours = _baseline(bench, sizes[-1], rows)
                seen = {kind: _ratios(found, names, ours, kind, kind) for kind in kinds}
                lost = dict.fromkeys(
                    size + how for kind, how in kinds.items() for size, ratio in seen[kind].items() if ratio < 1
                )
                one = f"; in one thread {_span(seen['both_inline'])}" if seen["both_inline"] else ""
                cells = []
                for kind, beside in (("forward", ""), ("both", one)):
                    alone = _ratios(found, names, ours, kind, f"{kind}_graph")
                    cells.append(_span(seen[kind]) + beside + _graphs(seen[f"{kind}_graph"], alone, names[-1]))
                compared = [size for size in map(show, sizes) if size in seen["forward"]]
                spread = " to ".join(dict.fromkeys([compared[0], compared[-1]])) if compared else "–"
                spread += _gaps(found, names)
                lines.append(f"| {claim} | {_machine(rows)} | {spread} | {' | '.join(cells)} | {', '.join(lost) or 'none'} |")
    return "\n".join(lines) if lines[2:] else "No record yet."


def _ratios(rows: Sequence[Row], rivals: Sequence[str], ours: str, theirs: str, kind: str) -> dict[str, float]:
    """By size: one kind of the fastest rival's time as a multiple of one kind of ours."""
    base = {row.size: getattr(row, kind) for row in rows if row.entry == ours}
    found: dict[str, float] = {}
    for row in rows:
        if row.entry in rivals and (time := getattr(row, theirs)) and base.get(row.size):
            found[row.size] = min(time / base[row.size], found.get(row.size, inf))
    return found


def _graphs(both: Mapping[str, float], alone: Mapping[str, float], waitless: str) -> str:
    """The ratios as CUDA graphs; where no graph of the rival was timed, of its plain time to our graph's."""
    if both:
        return f"; both as CUDA graphs ({waitless}) {_span(both)}"
    return f"; ours alone as a CUDA graph {_span(alone)}" if alone else ""


def _gaps(rows: Sequence[Row], rivals: Sequence[str]) -> str:
    """At which sizes no rival has a time, and why the first has none at the first of them."""
    timed = {row.size for row in rows if row.entry in rivals and row.status == "ok"}
    without = [row for row in rows if row.entry == rivals[0] and row.size not in timed]
    if not without:
        return ""
    first = f" ({without[0].size})" if without[1:] else ""
    return f"; {without[0].status} at {', '.join(row.size for row in without)}: {without[0].reason}{first}"


def _span(ratios: Mapping[str, float]) -> str:
    if not ratios:
        return "–"
    ends = [f"{table.times(end(ratios.values()))}×" for end in (min, max)]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def markdown(view: Table) -> str:
    """A table of the terminal as one of Markdown."""
    columns = [[str(column.header).replace("\n", " "), *map(str, column.cells)] for column in view.columns]
    heading, *rows = zip(*columns, strict=True)
    lines = [heading, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return f"**{view.title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _by_form(bench: str, rows: Sequence[Row]) -> Iterator[tuple[str, list[Size], Rows]]:
    """Sizes of one form at which something was timed, and their rows."""
    forms = BENCHES[bench].forms
    timed = dict.fromkeys(row.size for row in rows if row.status == "ok")
    sizes = parse_sizes(",".join(timed), forms) if timed else []
    for form in forms:
        alike = [size for size in sizes if len(size) == form.count("x") + 1]
        if alike:
            yield form, alike, [row for row in rows if row.size in map(show, alike)]


def _baseline(bench: str, size: Size, rows: Sequence[Row]) -> str:
    name = import_module(f".{bench}", __package__).baseline(size, rows[0].device.split(":")[0])
    return ", ".join([name, *BENCHES[bench].nonlinearities.split(",")[:1]]).rstrip(", ")


def _means(bench: str, rows: Sequence[Row]) -> bool:
    """Rows written before means were kept have none."""
    return BENCHES[bench].means and all(row.forward_mean for row in rows if row.status == "ok")


def _machine(rows: Sequence[Row]) -> str:
    threads = f", {rows[0].threads} thread{'s' * (rows[0].threads > 1)}" if rows[0].device == "cpu" else ""
    return f"{rows[0].device_name}{threads}"
