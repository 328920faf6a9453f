"""The runs of a sweep: which are planned, and the records of those that have ended."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from .. import _atomic
from .._provenance import commit
from .engine import files
from .engine.config import one_of
from .engine.folder import DIVERGED, RECORD

STATUSES = ("finished", "diverged", "not finished")


@dataclass(frozen=True)
class Planned:
    """Name one run of a sweep.

    Attributes:
        folder: its place in the folder of the sweep.
        what: ``TASK`` or ``TASK/RECIPE``.
        method, seed: as ``cwy train`` takes them.
        settings: ``key=value`` texts, as ``--set`` takes them.
    """

    folder: str
    what: str
    method: str
    seed: int
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """Hold what all runs of a sweep have in common.

    Attributes:
        out: the folder of the sweep.
        device, precision: as ``cwy train`` takes them.
        end: the moment, as :func:`time.time` counts, after which no run is started.
        stop: the moment at which runs are saved and stopped. The next sweep goes on with them.
    """

    out: Path
    device: str = "cpu"
    precision: str = "float32"
    end: float = float("inf")
    stop: float = float("inf")


def read(out: Path, run: Planned) -> dict[str, Any] | None:
    """Return the record of a run, or None if it has not finished. A damaged one raises."""
    record = out / run.folder / RECORD
    if not record.is_file():
        return None
    try:
        return files.read_json(record)
    except files.Damaged as damage:
        raise files.Damaged(f"{damage} Delete its folder to train the run again.") from None


def lines(out: Path, runs: Iterable[Planned]) -> list[str]:
    """Return a line of JSON for each run: its settings, and its record if it has finished."""
    made = []
    for run in runs:
        record = read(out, run)
        line: dict[str, Any] = {"run": run.folder, "status": "not finished"}
        if record is not None:
            line["status"] = "finished"
            line |= record
        else:
            line["method"] = run.method
            line["settings"] = list(run.settings)
            line["commit"] = commit()
            if (out / run.folder / DIVERGED).is_file():
                line["status"] = "diverged"
        made.append(json.dumps(line))
    return made


def read_known(path: Path) -> list[str]:
    """Return what :func:`lines` returned, from a file. A line that is no record raises."""
    found = path.read_text(encoding="utf-8").splitlines()
    if not found:
        raise files.Damaged(f"{path} is empty.")
    for number, text in enumerate(found, 1):
        try:
            _check_record(json.loads(text))
        except KeyError as error:
            raise files.Damaged(f"{path}, line {number}: a record must have {error}.") from None
        except (ValueError, TypeError) as error:
            raise files.Damaged(f"{path}, line {number} is no record: {error}.") from None
    return found


def _check_record(record: dict[str, Any]) -> None:
    """Raise unless a line has a run inside of a folder, and how it ended."""
    run = record["run"]
    place = PurePath(run)
    if not place.parts or place.is_absolute() or ".." in place.parts:
        raise ValueError(f"the run {run!r} is not inside of a folder")
    status = record["status"]
    if status not in STATUSES:
        raise ValueError(f"its status must be {one_of(STATUSES)}, got {status!r}")
    if status == "finished":
        value = record["best"]["value"]
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f"its best value must be a finite number, got {value!r}")


def restore(out: Path, known: Iterable[str]) -> None:
    """Write the records that :func:`lines` returned, so that their runs are not trained again.

    A run whose folder is there stays as it is.
    """
    for text in known:
        record = json.loads(text)
        folder = out / record.pop("run")
        status = record.pop("status")
        if status == "not finished" or folder.exists():
            continue
        folder.mkdir(parents=True)
        if status == "finished":
            files.write_json(folder / RECORD, record)
        else:
            _atomic.write(folder / DIVERGED, b"as in an earlier sweep\n")


def merge(path: Path, made: Iterable[str]) -> None:
    """Write the lines of runs into a file. Lines of other runs stay. A damaged file raises."""
    by_run = _by_run(path) | {json.loads(text)["run"]: text for text in made}
    path.parent.mkdir(parents=True, exist_ok=True)
    _atomic.write(path, "".join(f"{text}\n" for text in by_run.values()).encode())


def _by_run(path: Path) -> dict[str, str]:
    """Return the lines of a file by the run of each."""
    if not path.is_file():
        return {}
    try:
        return {json.loads(text)["run"]: text for text in path.read_text("utf-8").splitlines()}
    except (ValueError, KeyError, TypeError):
        raise files.Damaged(
            f"{path} is damaged: a line of it is no record of a run. Delete the line, or the file."
        ) from None
