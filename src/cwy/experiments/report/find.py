"""The runs below folders: those that can be read and shown, and the names of those that can't."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ...terminal import printable
from ..engine.run import CONFIG
from . import tables
from .panels import arrange
from .runs import ReportError, Run, read_run

LONGEST = 200
"""The most characters of a reason that are shown."""


def find_runs(folders: Iterable[Path], say: Callable[[str], object] | None = None) -> list[Run]:
    """Every run below the folders, themselves included, by path; raises where a folder holds none.

    One that is damaged is named by ``say`` and left out; without ``say``, or where none is whole, it raises.
    """
    runs, damaged = [], []
    for place in {
        place.resolve(): place for folder in folders for place in _places(folder)
    }.values():
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
        for told in damaged:
            say(told)
    return runs


def _places(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ReportError(f"{folder} is not a folder.")
    places = [config.parent for config in sorted(folder.rglob(CONFIG))]
    if not places:
        raise ReportError(
            f"no run below {folder}: a run folder holds {CONFIG}. `cwy train --help` says how to make one."
        )
    return places


def _try(run: Run) -> None:
    """Raises where the files of a run can be read, but not be shown: a key that is gone, a picture cut short."""
    try:
        (panel,) = arrange([run])
        _ = panel.title, panel.finding, panel.description.pictures(panel.series)
        _ = tables.summary(panel), tables.every_run([panel]), tables.environment([run])
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:LONGEST]
        raise ReportError(f"cannot show {run.folder}: {reason}.") from error
