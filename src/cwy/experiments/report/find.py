"""Find the runs below folders that can be read and shown, and the names of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ...terminal import printable
from ..engine.folder import CONFIG
from . import page, tables
from .panels import arrange
from .runs import ReportError, Run, read_run

LONGEST = 200
"""The most characters of a reason that are shown."""


def find_runs(folders: Iterable[Path], say: Callable[[str], object] | None = None) -> list[Run]:
    """Return every run below the folders, themselves included, by path.

    A folder without runs raises. A damaged run is named by ``say`` and left out. It raises
    without ``say``, or if no run is whole.
    """
    runs = []
    damaged = []
    places = {place.resolve(): place for folder in folders for place in _places(folder)}
    for place in places.values():
        try:
            run = read_run(place)
            _try(run)
        except ReportError as damage:
            damaged.append(printable(damage))
        else:
            runs.append(run)
    if damaged and (say is None or not runs):
        raise ReportError("\n".join(damaged))
    if say is not None:
        for message in damaged:
            say(message)
    return runs


def _places(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ReportError(f"{folder} is not a folder.")
    places = [config.parent for config in sorted(folder.rglob(CONFIG))]
    if not places:
        raise ReportError(
            f"no run below {folder}: a run folder holds {CONFIG}. "
            "`cwy train --help` says how to make one."
        )
    return places


def _try(run: Run) -> None:
    """Raise if a run can be read but not shown: a key is missing, a picture is cut short."""
    try:
        (panel,) = arrange([run])
        page.heading(panel)
        panel.description.pictures(panel.series)
        page.section(panel, ())
        tables.every_run([panel])
        tables.environment([run])
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:LONGEST]
        raise ReportError(f"cannot show {run.folder}: {reason}.") from error
