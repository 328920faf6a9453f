"""The report's tables, as HTML: summary of a panel, every run, settings, environment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean

from markupsafe import Markup

from ...terminal import printable
from .describe import Column, Series
from .figure import styles
from .markup import render
from .panels import LETTERS, Panel
from .runs import Run
from .words import duration, listed, number

TIME = Column("training time", lambda run: run.seconds, duration)


@dataclass(frozen=True)
class Cell:
    """A cell: its text, a smaller note below it, whether it may wrap, and how many columns it spans."""

    text: str
    note: str = ""
    wraps: bool = False
    columns: int = 1


@dataclass(frozen=True)
class Row:
    """A row: its cells, and before them a heading with a colored dot, a count and a warning."""

    cells: list[Cell] = field(default_factory=list)
    head: str = ""
    series: str = ""
    color: str = ""
    count: str = ""
    warning: str = ""


def summary(panel: Panel) -> Markup:
    """A row a series: its numbers over the seeds, of those that ended if any did, and what was published."""
    published = [panel.description.published(one.config) for one in panel.series]
    columns = [
        column if column.against is None else _relative(column, panel)
        for column in (*panel.description.columns, TIME)
    ]
    heads = ["method", *(column.heading for column in columns), *["published"] * any(published)]
    rows = []
    for one, style, told in zip(panel.series, styles(panel.series), published, strict=True):
        ended = [run for run in one.runs if run.record] or one.runs
        cells = [_over_seeds(column, ended) for column in columns]
        if any(published):
            cells.append(Cell(told or "–", wraps=True))
        count = one.count if len(one.runs) > 1 else ""
        rows.append(Row(cells, one.label, one.label, style["color"], count, _open(one)))
    return _table(heads, rows)


def _open(one: Series) -> str:
    """How many of its runs have not ended, and how far each has come."""
    left = [run for run in one.runs if not run.record]
    if not left:
        return ""
    count = f"{len(left)} " if len(one.runs) > 1 else ""
    statuses, totals = ({getattr(run, what) for run in left} for what in ("status", "total"))
    of = f" of {total:,}" if len(totals) == 1 and (total := totals.pop()) else ""
    return f"{count}{' or '.join(sorted(statuses))}, at {listed([f'{run.steps:,}' for run in left])}{of}"


def every_run(panels: Sequence[Panel]) -> Markup:
    """A row a run."""
    rows, several = [], len(panels) > 1
    for panel in panels:
        for one in panel.series:
            for run in one.runs:
                record = run.record or {}
                best = (
                    "{metric} {value:.4g} at {step:,}".format(**record["best"])
                    if record.get("best")
                    else "–"
                )
                _, drift = run.curve("train", "orthogonality_error")
                size = f"{record['parameters']:,}" if "parameters" in record else "–"
                cells = [
                    one.label,
                    str(run.seed),
                    run.status,
                    f"{run.steps:,}",
                    best,
                    number(max(drift)) if drift else "–",
                ]
                rows.append(
                    _row([*[panel.title] * several, *cells, size, printable(run.folder.name)])
                )
    heads = (
        "method",
        "seed",
        "status",
        "iterations",
        "best",
        "orthogonality error",
        "parameters",
        "folder",
    )
    return _table([*["task"] * several, *heads], rows)


def settings(runs: Sequence[Run]) -> Markup:
    """A row a setting; one column where all runs agree, else one a method."""
    several = len({run.task for run in runs}) > 1
    columns: dict[str, list[Run]] = {}
    for run in runs:
        columns.setdefault(f"{run.task}, {run.method}" if several else run.method, []).append(run)
    rows = []
    for key in dict.fromkeys(
        key for run in runs for key in run.config if key not in ("task", "method")
    ):
        texts = [
            ", ".join(dict.fromkeys(_setting(run, key) for run in members))
            for members in columns.values()
        ]
        cells = [Cell(text) for text in texts]
        if len(set(texts)) == 1:
            cells = [Cell(texts[0], columns=len(texts))]
        rows.append(Row(cells, f"{key} ({LETTERS[key]})" if key in LETTERS else key))
    return _table(["setting", *columns], rows)


def environment(runs: Sequence[Run]) -> Markup:
    """A row for each machine, set of versions, commit and day, with the number of runs."""
    found: dict[tuple[str, ...], int] = {}
    for record in (run.record for run in runs if run.record):
        versions = ", ".join(
            f"{name} {version}" for name, version in record.get("versions", {}).items()
        )
        commit = (
            f"{str(record.get('commit') or '?')[:12]}{' (changed)' if record.get('dirty') else ''}"
        )
        row = (
            str(record["device"]),
            str(record.get("threads", "–")),
            commit,
            str(record.get("started", ""))[:10],
            versions,
        )
        found[row] = found.get(row, 0) + 1
    rows = [_row([str(count), *row], wraps=True) for row, count in found.items()]
    if not rows:
        return Markup("<p>No run has ended yet.</p>")
    return _table(("runs", "device", "CPU threads", "commit", "day", "versions"), rows)


def _over_seeds(column: Column, runs: Sequence[Run]) -> Cell:
    values = [column.value(run) for run in runs]
    known = [value for value in values if value is not None]
    if not known:
        return Cell(column.absent if all(run.record for run in runs) else "–")
    # A number and its units stay on one line.
    middle, low, high = (
        column.form(value).replace(" ", "\u00a0") for value in (mean(known), min(known), max(known))
    )
    spread = [f"{low} to {high}"] if low != high else []
    if len(known) < len(values):
        spread.append(f"{len(known)} of {len(values)} seeds")
    return Cell(middle, note=", ".join(spread))


def _relative(column: Column, panel: Panel) -> Column:
    theirs = [run for run in panel.runs if run.method == column.against]
    known = [
        value
        for run in [r for r in theirs if r.record] or theirs
        if (value := column.value(run)) is not None
    ]
    base = mean(known) if known else None

    def value(run: Run) -> float | None:
        ours = column.value(run)
        return None if ours is None or not base else ours / base

    return replace(column, value=value)


def _setting(run: Run, key: str) -> str:
    value = run.config.get(key, "–")
    return "none" if value is None else str(value)


def _row(texts: Iterable[str], wraps: bool = False) -> Row:
    return Row([Cell(text, wraps=wraps) for text in texts])


def _table(heads: Sequence[str], rows: Sequence[Row]) -> Markup:
    return render("table.html", heads=heads, rows=rows)
