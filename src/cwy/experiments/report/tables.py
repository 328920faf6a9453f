"""The report's tables, as HTML: summary of a panel, every run, settings, environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from statistics import mean

from .describe import Column, Series
from .figure import styles
from .panels import LETTERS, Panel
from .runs import Run
from .words import duration, listed, number

TIME = Column("training time", lambda run: run.seconds, duration)


def summary(panel: Panel) -> str:
    """A row a series: its numbers over the seeds, of those that ended if any did, and what was published."""
    published = [panel.description.published(one.config) for one in panel.series]
    columns = [column if column.against is None else _relative(column, panel) for column in (*panel.description.columns, TIME)]
    heads = ["method", *(column.heading for column in columns), *["published"] * any(published)]
    rows = []
    for one, style, told in zip(panel.series, styles(panel.series), published, strict=True):
        dot = f'<i style="background:{style["color"]}"></i>'
        seeds = f" <small>{one.count}</small>" if len(one.runs) > 1 else ""
        ended = [run for run in one.runs if run.record] or one.runs
        cells = [f"<td>{_over_seeds(column, ended)}</td>" for column in columns]
        cells += [f'<td class="text">{escape(told or "–")}</td>'] * any(published)
        name = f'<th scope="row">{dot}{escape(one.label)}{seeds}{_open(one)}</th>'
        rows.append(f'<tr data-series="{escape(one.label)}">{name}{"".join(cells)}</tr>')
    return _table(heads, rows)


def _open(one: Series) -> str:
    """How many of its runs have not ended, and how far each has come."""
    left = [run for run in one.runs if not run.record]
    if not left:
        return ""
    count = f"{len(left)} " if len(one.runs) > 1 else ""
    statuses, totals = ({getattr(run, what) for run in left} for what in ("status", "total"))
    of = f" of {total:,}" if len(totals) == 1 and (total := totals.pop()) else ""
    told = f"{count}{' or '.join(sorted(statuses))}, at {listed([f'{run.steps:,}' for run in left])}{of}"
    return f'<br><small class="warn">{told}</small>'


def every_run(panels: Sequence[Panel]) -> str:
    """A row a run."""
    rows, several = [], len(panels) > 1
    for panel in panels:
        for one in panel.series:
            for run in one.runs:
                record = run.record or {}
                best = "{metric} {value:.4g} at {step:,}".format(**record["best"]) if record.get("best") else "–"
                drift = [row["orthogonality_error"] for row in run.metrics if row.get("orthogonality_error") is not None]
                size = f"{record['parameters']:,}" if "parameters" in record else "–"
                cells = [one.label, str(run.seed), run.status, f"{run.steps:,}", best, number(max(drift)) if drift else "–"]
                rows.append(_row([*[panel.title] * several, *cells, size, run.folder.name]))
    heads = ("method", "seed", "status", "iterations", "best", "orthogonality error", "parameters", "folder")
    return _table([*["task"] * several, *heads], rows)


def settings(runs: Sequence[Run]) -> str:
    """A row a setting; one column where all runs agree, else one a method."""
    several = len({run.task for run in runs}) > 1
    columns: dict[str, list[Run]] = {}
    for run in runs:
        columns.setdefault(f"{run.task}, {run.method}" if several else run.method, []).append(run)
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run.config if key not in ("task", "method")):
        cells = [", ".join(dict.fromkeys(_setting(run, key) for run in members)) for members in columns.values()]
        name = f"{key} ({LETTERS[key]})" if key in LETTERS else key
        alike = f'<td colspan="{len(cells)}">{escape(cells[0])}</td>' if len(set(cells)) == 1 else ""
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{alike or "".join(f"<td>{escape(c)}</td>" for c in cells)}</tr>')
    return _table(["setting", *columns], rows)


def environment(runs: Sequence[Run]) -> str:
    """A row for each machine, set of versions, commit and day, with the number of runs."""
    found: dict[tuple[str, ...], int] = {}
    for record in (run.record for run in runs if run.record):
        versions = ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items())
        commit = f"{str(record.get('commit') or '?')[:12]}{' (changed)' if record.get('dirty') else ''}"
        row = str(record["device"]), str(record.get("threads", "–")), commit, str(record.get("started", ""))[:10], versions
        found[row] = found.get(row, 0) + 1
    rows = [_row([str(count), *row], kind=' class="text"') for row, count in found.items()]
    return (
        _table(("runs", "device", "CPU threads", "commit", "day", "versions"), rows) if rows else "<p>No run has ended yet.</p>"
    )


def _over_seeds(column: Column, runs: Sequence[Run]) -> str:
    values = [column.value(run) for run in runs]
    known = [value for value in values if value is not None]
    if not known:
        return escape(column.absent if all(run.record for run in runs) else "–")
    # A number and its units stay on one line.
    middle, low, high = (column.form(value).replace(" ", "\u00a0") for value in (mean(known), min(known), max(known)))
    spread = [f"{low} to {high}"] if low != high else []
    if len(known) < len(values):
        spread.append(f"{len(known)} of {len(values)} seeds")
    return escape(middle) + (f"<br><small>{escape(', '.join(spread))}</small>" if spread else "")


def _relative(column: Column, panel: Panel) -> Column:
    theirs = [run for run in panel.runs if run.method == column.against]
    known = [value for run in [r for r in theirs if r.record] or theirs if (value := column.value(run)) is not None]
    base = mean(known) if known else None

    def value(run: Run) -> float | None:
        ours = column.value(run)
        return None if ours is None or not base else ours / base

    return replace(column, value=value)


def _setting(run: Run, key: str) -> str:
    value = run.config.get(key, "–")
    return "none" if value is None else str(value)


def _row(cells: Sequence[str], kind: str = "") -> str:
    return f"<tr>{''.join(f'<td{kind}>{escape(cell)}</td>' for cell in cells)}</tr>"


def _table(heads: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
