"""The runs of a sweep: which are planned, and the records of those that have ended."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import _atomic
from .._provenance import commit
from .engine.folder import DIVERGED, RECORD


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
    """Return the record of a run, or None if it has not finished."""
    record = out / run.folder / RECORD
    if not record.is_file():
        return None
    return json.loads(record.read_text())


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


def restore(out: Path, known: Iterable[str]) -> None:
    """Write the records that :func:`lines` returned, so that their runs are not trained again."""
    for text in known:
        record = json.loads(text)
        folder = out / record.pop("run")
        status = record.pop("status")
        if status == "not finished":
            continue
        folder.mkdir(parents=True, exist_ok=True)
        if status == "finished":
            _atomic.write(folder / RECORD, f"{json.dumps(record, indent=2)}\n".encode())
        else:
            _atomic.write(folder / DIVERGED, b"as in an earlier sweep\n")


def merge(path: Path, made: Iterable[str]) -> None:
    """Write the lines of runs into a file. Lines of other runs stay."""
    every = list(made)
    if path.is_file():
        every = [*path.read_text().splitlines(), *every]
    by_run = {json.loads(text)["run"]: text for text in every}
    path.parent.mkdir(parents=True, exist_ok=True)
    _atomic.write(path, "".join(f"{text}\n" for text in by_run.values()).encode())
