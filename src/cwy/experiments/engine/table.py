"""The table of ``cwy runs``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ...terminal import printable
from .checkpoint import step_of
from .run import CONFIG, Folder


def table(root: Path) -> Table | None:
    """One row a run below a folder; None if there is none."""
    view = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    view.add_column("run", overflow="fold", min_width=12)
    view.add_column("method", no_wrap=True)
    for heading in ("step", "loss", "accuracy", "best", "time"):
        view.add_column(heading, justify="right", no_wrap=True)
    view.add_column("", no_wrap=True)
    for cells in _rows(root):
        view.add_row(*cells)
    return view if view.row_count else None


def _rows(root: Path) -> Iterator[list[str]]:
    for path in sorted(config.parent for config in root.rglob(CONFIG)):
        try:
            own, *cells = _cells(Folder(path))
        except (OSError, LookupError, TypeError, ValueError, ArithmeticError):
            own, cells = path.name, [*[""] * 6, "damaged"]
        name = path.relative_to(root).as_posix() if path != root else own
        yield [printable(name), *cells]


def _cells(folder: Folder) -> list[str]:
    settings, rows, record = folder.settings(), folder.rows(), folder.record() if folder.finished else None
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
        _number(final.get("accuracy"), ".2%"),
        _number(best["value"] if best else None, ".2%" if best and "accuracy" in best["metric"] else ".2e"),
        _number(rows[-1]["seconds"] if rows else None, ".1f", " s"),
        "done" if record else "diverged" if folder.diverged else "open",
    ]


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"
