"""Pages made of committed rows: the Benchmarks page of the docs, and ``results/README.md``.

Nothing stands on them that no record holds. ``python -m cwy.bench.output.pages results`` writes
``results/README.md`` again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from rich.table import Table

from ..._atomic import write
from ..suites import BENCHES, Size, baseline, load, show_size
from . import figures, tables
from .rows import KINDS, Measurement, Panel, caption, machine, panels, read


def records(folder: Path, bench: str) -> dict[str, list[Measurement]]:
    """Read a benchmark's measurements by place: those of ``folder/<place>/<bench>.csv``."""
    paths = sorted(folder.glob(f"*/{bench}.csv"), reverse=True)
    return {path.parent.name: read(path) for path in paths}


def section(folder: Path, bench: str) -> str:
    """Write what was measured of a benchmark, in Markdown.

    Each machine has a picture, tables of times, and who was faster at every size.
    """
    parts = []
    for place, found in records(folder, bench).items():
        where = found[0].context
        parts.append(f"## {machine(where)}")
        for panel in panels(BENCHES[bench], found):
            parts += _panel_parts(place, bench, panel)
        untimed = tables.untimed(found).plain.splitlines()
        if untimed:
            parts.append(folded("Without a time", "\n".join(f"- {line}" for line in untimed)))
        rows = f"rows: `results/bench/{place}/{bench}.csv`"
        parts.append(f"<small>{caption(where, found[0].dtype)}; {rows}</small>")
    if not parts:
        return f"No record yet: `cwy bench {bench}`."
    return "\n\n".join(parts)


def _panel_parts(place: str, bench: str, panel: Panel) -> Iterator[str]:
    title = f"{BENCHES[bench].about.rstrip('.')}, on {machine(panel.found[0].context)}"
    yield figure(picture(place, bench, panel.form), title)
    timed = [kind for kind in KINDS if any(one.seconds(kind) for one in panel.found)]
    views = [tables.overview(panel.found, panel.sizes, kind) for kind in timed]
    for view in views:
        # The table of plain calls is open, what the kernels take by themselves folds.
        title = str(view.title)
        if view is _plain(views):
            yield f"**{title}**\n\n{markdown(view)}"
        else:
            yield folded(title, markdown(view))
    lines = []
    for size in panel.sizes:
        compared = tables.findings(panel.at(size), _baseline(bench, size, panel.found))
        lines.append(f"- {compared}")
    yield "\n".join(lines)
    formulas = load(bench).formulas
    if formulas is not None:
        last = panel.sizes[-1]
        view = tables.costs(panel.at(last), formulas(last))
        yield f"**{view.title}**\n\n{markdown(view)}"


def _plain(views: Sequence[Table]) -> Table:
    """Return the table of plain calls, forward and backward where both were timed."""
    return views[min(1, len(views) - 1)]


def figure(path: str, text: str) -> str:
    """Return a figure in its form for this screen, which opens as a whole when clicked."""
    narrow = path.replace(".svg", "-narrow.svg")
    return (
        f'<a class="figure" href="{path}"><picture>'
        f'<source media="(max-width: 600px)" srcset="{narrow}">'
        f'<img src="{path}" alt="{text}"></picture></a>'
    )


def folded(title: str, text: str) -> str:
    """Return text that a reader unfolds."""
    inside = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
    return f'??? note "{title}"\n\n{inside}'


def draw(folder: Path, site: Path) -> None:
    """Draw the pictures that :func:`section` shows."""
    for name, bench in BENCHES.items():
        for place, found in records(folder, name).items():
            for panel in panels(bench, found):
                path = site / "benchmarks" / picture(place, name, panel.form)
                path.parent.mkdir(parents=True, exist_ok=True)
                base = _baseline(name, panel.sizes[-1], found)
                figures.draw_for_pages(panel, base, path.with_suffix(""), bench.means)


def picture(place: str, bench: str, form: str) -> str:
    """Return where a picture lies, from the pages of the benchmarks."""
    return f"{place}/{bench}-{form}.svg"


TITLES = {
    "model": "Training steps",
    "matrix": "Forming a matrix",
    "multiply": "Multiplying by Q",
    "stiefel": "A step on the Stiefel manifold",
    "rnn": "Recurrences",
    "figure1c": "Figure 1c: three maps",
    "figure2": "Figure 2: one reflection at a time",
    "table1": "Table 1: every method",
}
"""The pages of the benchmarks, in the order in which they are summarized."""


def summary(folder: Path) -> str:
    """Compare ours with free weights and with the fastest rival, per benchmark and machine.

    The times are of plain calls, forward and backward. A range is over the sizes.
    """
    lines = [
        "| benchmark | machine | ours fastest? | ours ÷ free | fastest rival ÷ ours | which |",
        "|---|---|---|---|---|---|",
    ]
    for bench, title in TITLES.items():
        for found in records(folder, bench).values():
            sizes = [(p, size) for p in panels(BENCHES[bench], found) for size in p.sizes]
            compared = [_at(bench, panel, size) for panel, size in sizes]
            floors = {str(i): one.floor for i, one in enumerate(compared) if one.floor}
            ratios = {str(i): one.rival for i, one in enumerate(compared) if one.rival}
            cells = [
                f"[{title}](benchmarks/{bench}.md)",
                machine(found[0].context),
                _verdict(list(ratios.values())),
                _span(floors),
                _span(ratios),
                ", ".join(dict.fromkeys(f"`{one.name}`" for one in compared if one.name)) or "–",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class _Compared:
    """Hold our time as a multiple of the floor's, and the fastest rival's as a multiple of ours."""

    floor: float | None
    rival: float | None
    name: str = ""


def _at(bench: str, panel: Panel, size: Size) -> _Compared:
    found = panel.at(size)
    ours = _baseline(bench, size, panel.found)
    base = next((one.ranked for one in found if one.entry == ours), None)
    if not base:
        return _Compared(None, None)
    floors = [one.ranked for one in found if one.group == "floor" and one.ranked]
    plain = None
    if floors:
        plain = base / floors[0]
    others = []
    for one in tables.rivals(found, ours):
        # A mode, as in "cwy (compiled)", is compared with the same mode.
        alike = one.entry.partition(" (")[2] == ours.partition(" (")[2]
        if one.ranked and (alike or bench != "model"):
            others.append((one.ranked / base, one.entry))
    if not others:
        return _Compared(plain, None)
    ratio, name = min(others)
    return _Compared(plain, ratio, name)


def _verdict(ratios: Sequence[float]) -> str:
    """Return whether ours is the fastest: yes, in part or no."""
    if not ratios:
        return "–"
    ahead = sum(ratio > 1 for ratio in ratios)
    if ahead == len(ratios):
        return verdict("yes")
    if ahead:
        return f"{verdict('in part')}: at {ahead} of {len(ratios)} sizes"
    return verdict("no")


def verdict(word: str) -> str:
    """Write yes, in part or no in its color."""
    return f'<span class="verdict-{word.split()[-1]}">{word}</span>'


@dataclass(frozen=True)
class Claim:
    """Hold what the paper claims about times.

    Attributes:
        words: the claim.
        bench: the benchmark that shows it.
        rivals: the entries that CWY is compared with. A CUDA graph can hold the last.
    """

    words: str
    bench: str
    rivals: tuple[str, ...]


CLAIMS = (
    Claim(
        "The exponential takes 10 to 1000 times as long as CWY",
        "figure1c",
        ("exponential", "exponential, no sync"),
    ),
    Claim(
        "The Cayley map takes 10 to 1000 times as long as CWY",
        "figure1c",
        ("cayley", "cayley, no sync"),
    ),
    Claim("HR takes 20 times as long as CWY", "figure2", ("HR, abs",)),
)
"""The paper's claims."""

HOW = {
    "forward": "",
    "both": "",
    "both_inline": " in one thread",
    "both_blocked": " waiting for each call",
    "both_repeated": " in one program",
    "forward_graph": " as graphs",
    "both_graph": " as graphs",
}
"""What is added to a size at which a rival wins by one kind of time."""


def claims(folder: Path) -> str:
    """Compare the paper's claims with what was measured, in Markdown."""
    lines = [
        "| the paper | measured on | sizes | forward | forward + backward | the rival wins at |",
        "|---|---|---|---|---|---|",
    ]
    for claim in CLAIMS:
        for found in records(folder, claim.bench).values():
            for panel in panels(BENCHES[claim.bench], found):
                cells = [claim.words, machine(found[0].context), *_compared(claim, panel)]
                lines.append(f"| {' | '.join(cells)} |")
    if len(lines) == 2:
        return "No record yet."
    return "\n".join(lines)


def _compared(claim: Claim, panel: Panel) -> list[str]:
    """Return the sizes, the ratios forward and of both, and where the rival wins."""
    ours = _baseline(claim.bench, panel.sizes[-1], panel.found)
    seen = {kind: _ratios(panel, claim.rivals, ours, kind, kind) for kind in KINDS}
    lost = [
        size + how for kind, how in HOW.items() for size, ratio in seen[kind].items() if ratio < 1
    ]
    compared = [name for name in map(show_size, panel.sizes) if name in seen["forward"]]
    sizes = "–"
    if compared:
        sizes = " to ".join(dict.fromkeys([compared[0], compared[-1]]))
    inline = ""
    if seen["both_inline"]:
        inline = f", in one thread {_span(seen['both_inline'])}"
    graphs = {}
    for kind in ("forward", "both"):
        plain = _ratios(panel, claim.rivals, ours, kind, f"{kind}_graph")
        graphs[kind] = _graphs(seen[f"{kind}_graph"], plain, claim.rivals[-1])
    return [
        sizes + _gaps(panel.found, claim.rivals),
        _span(seen["forward"]) + graphs["forward"],
        _span(seen["both"]) + inline + graphs["both"],
        ", ".join(dict.fromkeys(lost)) or "none",
    ]


def _ratios(
    panel: Panel, rivals: Sequence[str], ours: str, theirs: str, kind: str
) -> dict[str, float]:
    """Return by size one kind of the fastest rival's time as a multiple of one kind of ours."""
    base = {one.size: one.seconds(kind) for one in panel.found if one.entry == ours}
    found: dict[str, float] = {}
    for one in panel.found:
        time = one.seconds(theirs)
        mine = base.get(one.size)
        if one.entry in rivals and time and mine:
            found[one.size] = min(time / mine, found.get(one.size, inf))
    return found


def _graphs(both: Mapping[str, float], plain: Mapping[str, float], capturable: str) -> str:
    """Return the ratios as CUDA graphs.

    If no graph of the rival was timed, its plain time is divided by our graph's.
    """
    if both:
        return f", both as CUDA graphs ({capturable}) {_span(both)}"
    if plain:
        return f", only ours as a CUDA graph {_span(plain)}"
    return ""


def _gaps(found: Sequence[Measurement], rivals: Sequence[str]) -> str:
    """List the sizes at which no rival has a time, and the reason at the first of them."""
    timed = {one.size for one in found if one.entry in rivals and one.status == "ok"}
    without = [one for one in found if one.entry == rivals[0] and one.size not in timed]
    if not without:
        return ""
    first = ""
    if len(without) > 1:
        first = f" ({without[0].size})"
    sizes = ", ".join(one.size for one in without)
    return f", {without[0].status} at {sizes}: {without[0].reason}{first}"


def _span(ratios: Mapping[str, float]) -> str:
    if not ratios:
        return "–"
    ends = [f"{tables.times(end(ratios.values()))}×" for end in (min, max)]
    return " to ".join(dict.fromkeys(ends))


def markdown(view: Table) -> str:
    """Write a table of the terminal as one of Markdown."""
    columns = []
    for column in view.columns:
        heading = str(column.header).replace("\nx", "x").replace("\n", " ")
        columns.append([heading, *map(str, column.cells)])
    heading, *rows = zip(*columns, strict=True)
    lines = [heading, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _baseline(bench: str, size: Size, found: Sequence[Measurement]) -> str:
    described = BENCHES[bench]
    return baseline(described, size, found[0].context.device, described.usual_nonlinearities)


NOTES = "notes.md"
"""What no record can hold about the files of a folder, written by hand."""


def write_index(results: Path) -> None:
    """Write ``README.md`` of a folder of records."""
    write(results / "README.md", index(results).encode())


def index(results: Path) -> str:
    """List every record, with the command that made it, in Markdown.

    A folder's ``notes.md`` stands below its list.
    """
    parts = [
        "# Records",
        "Measurements, as the commands wrote them. This page is made of the records, and of the "
        "file `notes.md` of each folder. `python -m cwy.bench.output.pages results` writes it "
        "again.",
        "## Benchmarks",
        "A row is one entry at one size by one kind of time. It carries its device, versions, "
        "commit, seed, date and command. On a CPU, compare only within one run. The Benchmarks "
        "page of the docs shows these rows as tables and figures.",
    ]
    for folder in sorted(path for path in (results / "bench").iterdir() if path.is_dir()):
        parts += [f"### {folder.name}", _files(folder), *_notes(folder)]
    parts += [
        "## Runs",
        "A folder per run holds its settings, its log and, once the run has ended, its record. "
        "The Results page of the docs lists the commands and shows the runs.",
    ]
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        if folder.name != "bench":
            parts += [f"### {folder.name}", _runs(folder), *_notes(folder)]
    return "\n\n".join(parts) + "\n"


def _files(folder: Path) -> str:
    lines = ["| file | machine | commit | date | command |", "|---|---|---|---|---|"]
    for path in sorted(folder.glob("*.csv")):
        found = read(path)
        where = found[0].context
        commands = dict.fromkeys(one.context.command for one in found)
        commits = dict.fromkeys(one.context.commit for one in found)
        cells = [
            f"`{path.name}`",
            machine(where),
            ", ".join(commits),
            where.date[:10],
            "<br>".join(f"`{command}`" for command in commands),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _runs(folder: Path) -> str:
    recipes: dict[str, dict[str, int]] = {}
    for path in sorted(folder.glob("*/config.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        methods = recipes.setdefault(config["recipe"], {})
        methods[config["method"]] = methods.get(config["method"], 0) + 1
    lines = ["| recipe | runs of each method |", "|---|---|"]
    for recipe, methods in recipes.items():
        counts = ", ".join(f"{method} {count}" for method, count in methods.items())
        lines.append(f"| `{folder.name}/{recipe}` | {counts} |")
    return "\n".join(lines)


def _notes(folder: Path) -> list[str]:
    path = folder / NOTES
    if not path.exists():
        return []
    return [path.read_text(encoding="utf-8").strip()]


if __name__ == "__main__":
    write_index(Path(sys.argv[1]))
