"""The report's tables: summary of a panel, every run, settings, environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

from markupsafe import Markup

from ...terminal import printable
from ..engine.config import as_given
from .describe import Column, Series
from .figure import styles
from .markup import render
from .panels import LETTERS, Panel
from .runs import Run
from .words import duration, listed, number

TIME = Column("training time", lambda run: run.seconds, duration)
LONGEST_CLAIM = 40
"""The most characters of a published result in a cell. Longer ones are a list below the table."""


@dataclass(frozen=True)
class Cell:
    """Hold a cell: its text, a small note below it, whether it wraps, and the columns it spans."""

    text: str
    note: str = ""
    wraps: bool = False
    columns: int = 1


@dataclass(frozen=True)
class Row:
    """Hold a row: its cells, and before them a heading with a colored dot, a count, a warning."""

    cells: list[Cell] = field(default_factory=list)
    head: str = ""
    series: str = ""
    color: str = ""
    count: str = ""
    warning: str = ""


@dataclass(frozen=True)
class Table:
    """Hold a table as data. A template that prints it gets HTML."""

    heads: Sequence[str]
    rows: Sequence[Row]

    def __html__(self) -> Markup:
        """Return the table as HTML."""
        return render("table.html", heads=self.heads, rows=self.rows)


def summary(panel: Panel) -> Table:
    """Return a row per series: its numbers over the seeds, and what was published.

    The numbers are of the runs that ended, if any did. Long claims are in :func:`claims`. A column
    of ratios that no run has is left out.
    """
    every = [_relative(column, panel) for column in (*panel.description.columns, TIME)]
    columns = [column for column in every if column.against is None or _has_value(column, panel)]
    heads = ["method", *(column.heading for column in columns)]
    published = _published(panel)
    has_column = bool(published) and not claims(panel)
    if has_column:
        heads.append("published")
    rows = []
    for one, style in zip(panel.series, styles(panel.series), strict=True):
        ended = [run for run in one.runs if run.record] or one.runs
        cells = [_over_seeds(column, ended) for column in columns]
        if has_column:
            cells.append(Cell(published.get(one.label, "–"), wraps=True))
        count = ""
        if len(one.runs) > 1:
            count = one.count
        rows.append(
            Row(
                cells,
                head=one.label,
                series=one.label,
                color=style["color"],
                count=count,
                warning=_open(one),
            )
        )
    return Table(heads, rows)


def _has_value(column: Column, panel: Panel) -> bool:
    return any(column.value(run) is not None for run in panel.runs)


def claims(panel: Panel) -> dict[str, str]:
    """Return what was published of each series, if that is too long for a column."""
    published = _published(panel)
    if max(map(len, published.values()), default=0) <= LONGEST_CLAIM:
        return {}
    return published


def _published(panel: Panel) -> dict[str, str]:
    found = {one.label: panel.description.published(one.config) for one in panel.series}
    return {label: claim for label, claim in found.items() if claim}


def _open(one: Series) -> str:
    """Return how many of its runs have not ended, and how far each has come."""
    left = [run for run in one.runs if not run.record]
    if not left:
        return ""
    statuses = " or ".join(sorted({run.status for run in left}))
    steps = listed([f"{run.steps:,}" for run in left])
    warning = f"{statuses}, at {steps}"
    if len(one.runs) > 1:
        warning = f"{len(left)} {warning}"
    totals = {run.total for run in left}
    total = totals.pop()
    if total and not totals:
        warning += f" of {total:,}"
    return warning


RUN_HEADS = (
    "method",
    "seed",
    "status",
    "iterations",
    "best",
    "orthogonality error",
    "parameters",
    "folder",
)


def every_run(panels: Sequence[Panel]) -> Table:
    """Return a row per run. If there are several panels, it begins with the panel's title."""
    heads = list(RUN_HEADS)
    several = len(panels) > 1
    if several:
        heads.insert(0, "task")
    rows = []
    for panel in panels:
        for one in panel.series:
            for run in one.runs:
                texts = _run_texts(one, run)
                if several:
                    texts.insert(0, panel.title)
                rows.append(_row(texts))
    return Table(heads, rows)


def _run_texts(one: Series, run: Run) -> list[str]:
    """Return a text for each of RUN_HEADS."""
    record = run.record or {}
    best = "–"
    if record.get("best"):
        best = "{metric} {value:.4g} at {step:,}".format(**record["best"])
    _, errors = run.curve("train", "orthogonality_error")
    error = "–"
    if errors:
        error = number(max(errors))
    size = "–"
    if "parameters" in record:
        size = f"{record['parameters']:,}"
    name = printable(run.folder.name)
    return [one.label, str(run.seed), run.status, f"{run.steps:,}", best, error, size, name]


def settings(runs: Sequence[Run]) -> Table:
    """Return a row per setting, with one cell where all runs agree, or else one per method."""
    several = len({run.task for run in runs}) > 1
    columns: dict[str, list[Run]] = {}
    for run in runs:
        heading = run.method
        if several:
            heading = f"{run.task}, {run.method}"
        columns.setdefault(heading, []).append(run)
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = []
    for key in keys:
        if key in ("task", "method"):
            continue
        texts = [
            ", ".join(dict.fromkeys(_setting(run, key) for run in members))
            for members in columns.values()
        ]
        cells = [Cell(text) for text in texts]
        if len(set(texts)) == 1:
            cells = [Cell(texts[0], columns=len(texts))]
        head = key
        if key in LETTERS:
            head = f"{key} ({LETTERS[key]})"
        rows.append(Row(cells, head=head))
    return Table(["setting", *columns], rows)


def environment(runs: Sequence[Run]) -> Table:
    """Return a row for each machine, set of versions, commit and day, with the number of runs."""
    found = Counter(_environment(run.record) for run in runs if run.record)
    rows = [_row([str(count), *texts], wraps=True) for texts, count in found.items()]
    return Table(("runs", *ENVIRONMENT_HEADS), rows)


ENVIRONMENT_HEADS = ("device", "CPU threads", "commit", "day", "versions")


def _environment(record: dict[str, Any]) -> tuple[str, ...]:
    """Return a text for each of ENVIRONMENT_HEADS."""
    commit = str(record.get("commit") or "?")[:12]
    if record.get("dirty"):
        commit += " (changed)"
    versions = [f"{name} {version}" for name, version in record.get("versions", {}).items()]
    threads = str(record.get("threads", "–"))
    day = str(record.get("started", ""))[:10]
    return str(record["device"]), threads, commit, day, ", ".join(versions)


def _over_seeds(column: Column, runs: Sequence[Run]) -> Cell:
    values = [column.value(run) for run in runs]
    known = [value for value in values if value is not None]
    if not known:
        text = "–"
        if all(run.record for run in runs):
            text = column.absent
        return Cell(text)
    low = _on_one_line(column, min(known))
    high = _on_one_line(column, max(known))
    notes = []
    if low != high:
        notes.append(f"{low} to {high}")
    if len(known) < len(values):
        notes.append(f"{len(known)} of {len(values)} seeds")
    return Cell(_on_one_line(column, mean(known)), note=", ".join(notes))


def _on_one_line(column: Column, value: float) -> str:
    """Return a number whose units are not wrapped."""
    return column.form(value).replace(" ", "\u00a0")


def _relative(column: Column, panel: Panel) -> Column:
    """Return the column divided by the mean of the method that it is against, if any.

    Runs that were trained at the same time have shared a device, and are not compared.
    """
    if column.against is None:
        return column
    alone = {
        run.folder for run in panel.runs if not any(run.overlaps(other) for other in panel.runs)
    }
    theirs = [run for run in panel.runs if run.method == column.against and run.folder in alone]
    ended = [run for run in theirs if run.record] or theirs
    values = [column.value(run) for run in ended]
    known = [value for value in values if value is not None]
    base = 0.0
    if known:
        base = mean(known)

    def value(run: Run) -> float | None:
        ours = column.value(run)
        if ours is None or not base or run.folder not in alone:
            return None
        return ours / base

    return replace(column, value=value)


def _setting(run: Run, key: str) -> str:
    return as_given(run.config.get(key, "–"))


def _row(texts: Iterable[str], wraps: bool = False) -> Row:
    return Row([Cell(text, wraps=wraps) for text in texts])
