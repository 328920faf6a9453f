"""The table of ``cwy runs``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ...terminal import printable
from .checkpoint import step_of
from .run import CONFIG, Folder

NAME = 12
"""The fewest columns for a run's name."""

HEADINGS = ("run", "method", "step", "loss", "measure", "best", "time", "")
MEASURES = {
    "accuracy": "acc {:.2%}",
    "bleu": "BLEU {:.1f}",
    "perplexity": "ppl {:.3g}",
    "minimum": "grad² {:.2g}",
}
"""Beside the loss, the first of these that a run has measured."""


def table(root: Path, width: int = 80) -> Table | None:
    """One row a run below a folder, in so many columns of a terminal; None if there is none."""
    rows = list(_rows(root))
    if not rows:
        return None
    others = [max(len(row[at]) for row in [HEADINGS, *rows]) for at in range(1, len(HEADINGS))]
    # A space stands between two columns.
    room = max(NAME, width - sum(others) - len(others))
    view = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    view.add_column(HEADINGS[0], no_wrap=True)
    view.add_column(HEADINGS[1], no_wrap=True)
    for heading in HEADINGS[2:-1]:
        view.add_column(heading, justify="right", no_wrap=True)
    view.add_column(HEADINGS[-1], no_wrap=True)
    for name, *cells in rows:
        view.add_row(in_parts(name, room), *cells)
    return view


def in_parts(name: str, width: int) -> str:
    """Break a name after hyphens and slashes only, into lines of a width if its parts allow.

    Example:
        >>> in_parts("results/nmt/cwy-128-tanh-seed0", 12).split("\\n")
        ['results/nmt/', 'cwy-128-', 'tanh-seed0']
    """
    lines = [""]
    for part in re.findall(r"[^-/]*[-/]|[^-/]+", name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _rows(root: Path) -> Iterator[list[str]]:
    for path in sorted(config.parent for config in root.rglob(CONFIG)):
        try:
            own, *cells = _cells(Folder(path))
        except (OSError, LookupError, TypeError, ValueError, ArithmeticError):
            own, cells = path.name, [*[""] * 6, "damaged"]
        name = path.relative_to(root).as_posix() if path != root else own
        yield [printable(name), *cells]


def _cells(folder: Folder) -> list[str]:
    settings, rows, record = (
        folder.settings(),
        folder.rows(),
        folder.record() if folder.finished else None,
    )
    finals = {row["split"]: row for row in rows}
    final = finals.get("test") or finals.get("validation") or finals.get("train") or {}
    best = record["best"] if record else None
    saved = folder.last_checkpoint()
    step = max(rows[-1]["step"] if rows else 0, step_of(saved) if saved else 0)
    return [
        f"{settings.task}/{settings.name}",
        settings.method,
        str(step),
        _number(final.get("loss"), ".2e"),
        next((form.format(final[name]) for name, form in MEASURES.items() if name in final), ""),
        _number(
            best["value"] if best else None,
            ".2%" if best and "accuracy" in best["metric"] else ".2e",
        ),
        _number(rows[-1]["seconds"] if rows else None, ".0f", " s"),
        "done" if record else "diverged" if folder.diverged else "open",
    ]


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"
