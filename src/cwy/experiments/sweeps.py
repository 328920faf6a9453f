"""The runs of a sweep: which are planned, and the records of those that have ended."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from filelock import FileLock, Timeout

from .. import _atomic
from .._provenance import commit
from .engine import files
from .engine.config import ConfigError, one_of
from .engine.folder import CONFIG, DIVERGED, RECORD, Folder
from .engine.task import Settings, differences, settings

FINISHED = "finished"
HAS_DIVERGED = "diverged"
NOT_FINISHED = "not finished"
STATUSES = (FINISHED, HAS_DIVERGED, NOT_FINISHED)
LOCK = ".sweep.lock"
PATIENCE = 60
"""Seconds to wait for another sweep in the same folder, which holds its lock for moments."""


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


def wanted(run: Planned, place: Place) -> Settings:
    """Return the settings of a planned run."""
    return settings(
        run.what, run.method, run.seed, run.settings, device=place.device, precision=place.precision
    )


def read(out: Path, run: Planned) -> dict[str, Any] | None:
    """Return the record of a run, or None if it has not finished. A damaged one raises."""
    path = out / run.folder / RECORD
    if not path.is_file():
        return None
    try:
        record = files.read_json(path)
        _check_finished(record)
    except files.Damaged as damage:
        raise files.Damaged(f"{damage} Delete its folder to train the run again.") from None
    except (KeyError, TypeError, ValueError) as error:
        raise _no_record(path, error) from None
    return record


def _no_record(path: Path, error: Exception) -> files.Damaged:
    return files.Damaged(
        f"{path} is no record: {_reason(error)}. Delete its folder to train the run again."
    )


@dataclass(frozen=True)
class Records:
    """Look up how runs ended, in the folder of a sweep and then in records of other sweeps.

    Attributes:
        out: the folder.
        known: records of other sweeps by the folders of their runs.
    """

    out: Path
    known: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def finished(self, run: Planned) -> Mapping[str, Any] | None:
        """Return the record of a run that has finished, or None."""
        record = read(self.out, run)
        if record is not None or self._has_begun(run):
            return record
        return self._known(run, FINISHED)

    def best(self, run: Planned) -> float | None:
        """Return the best value of a run, or None if it has not finished.

        A record without one raises.
        """
        record = self.finished(run)
        if record is None:
            return None
        try:
            return best_value(record)
        except (KeyError, TypeError, ValueError) as error:
            raise _no_record(self.out / run.folder / RECORD, error) from None

    def diverged(self, run: Planned) -> bool:
        """Return whether a run has diverged."""
        if self._has_begun(run):
            return (self.out / run.folder / DIVERGED).is_file()
        return self._known(run, HAS_DIVERGED) is not None

    def found_settings(self, run: Planned, place: Place) -> Settings | None:
        """Return the settings of a run that has begun or is known, or None."""
        folder = Folder(self.out / run.folder)
        if folder.exists:
            return folder.settings()
        record = read(self.out, run)
        if record is None and not self._has_begun(run):
            record = self.known.get(run.folder)
        if record is None:
            return None
        if "config" in record:
            return Settings.from_dict(record["config"])
        # Older lines of runs that diverged have no precision.
        return settings(
            run.what, record["method"], run.seed, record["settings"], precision=place.precision
        )

    def known_lines(self, runs: Iterable[Planned]) -> list[Mapping[str, Any]]:
        """Return the known records of those of these runs that were not begun in the folder."""
        unbegun = [run for run in runs if not self._has_begun(run)]
        return [self.known[run.folder] for run in unbegun if run.folder in self.known]

    def _has_begun(self, run: Planned) -> bool:
        return has_begun(self.out / run.folder)

    def _known(self, run: Planned, status: str) -> Mapping[str, Any] | None:
        record = self.known.get(run.folder)
        if record is None or record["status"] != status:
            return None
        return record


def has_begun(folder: Path) -> bool:
    """Return whether a run was begun in a folder."""
    return any((folder / name).exists() for name in (CONFIG, RECORD, DIVERGED))


def lines(out: Path, runs: Iterable[Planned]) -> list[dict[str, Any]]:
    """Return a line for each run: its settings, and its record if it has finished."""
    made = []
    for run in runs:
        record = read(out, run)
        line: dict[str, Any] = {"run": run.folder, "status": NOT_FINISHED}
        if record is not None:
            line["status"] = FINISHED
            line |= record
        else:
            line["method"] = run.method
            line["settings"] = list(run.settings)
            line["commit"] = commit()
            folder = Folder(out / run.folder)
            if folder.diverged:
                line["status"] = HAS_DIVERGED
                if folder.exists:
                    line["config"] = folder.settings().to_dict()
        made.append(line)
    return made


def read_known(path: Path) -> dict[str, dict[str, Any]]:
    """Return the runs of a file of :func:`lines` that have ended, by their folders.

    A line that is no record raises.
    """
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise files.Damaged(f"{path} is no text in UTF-8.") from None
    if not texts:
        raise files.Damaged(f"{path} is empty.")
    found = {}
    for number, text in enumerate(texts, 1):
        try:
            record = json.loads(text)
            _check_known(record)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise files.Damaged(f"{path}, line {number} is no record: {_reason(error)}.") from None
        if record["status"] != NOT_FINISHED:
            found[record["run"]] = record
    return found


def _check_known(record: dict[str, Any]) -> None:
    """Raise unless a line has a run inside of a folder, and how it ended."""
    run = record["run"]
    place = PurePath(run)
    if not place.parts or place.is_absolute() or ".." in place.parts:
        raise ValueError(f"the run {run!r} is not inside of a folder")
    status = record["status"]
    if status not in STATUSES:
        raise ValueError(f"its status must be {one_of(STATUSES)}, got {status!r}")
    if status == FINISHED:
        _check_finished(record)
        best_value(record)
        for key in ("final", "steps", "seconds", "parameters"):
            if key not in record:
                raise KeyError(key)
    if status == HAS_DIVERGED and "config" in record:
        Settings.from_dict(record["config"])
    elif status == HAS_DIVERGED:
        # Older versions wrote no config.
        record["method"], tuple(record["settings"])


def _check_finished(record: dict[str, Any]) -> None:
    """Raise unless a record has the settings of a run."""
    Settings.from_dict(record["config"])


def best_value(record: Mapping[str, Any]) -> float:
    """Return the best value of a finished run. A record without one raises."""
    best = record["best"]
    if not isinstance(best, dict):
        raise ValueError(f"it has no best value, but {best!r}")
    value = best["value"]
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"its best value must be a finite number, got {value!r}")
    return value


def _reason(error: Exception) -> str:
    """Return why something is no record, as a part of a sentence."""
    if isinstance(error, KeyError):
        return f"a record must have {error}"
    return str(error).rstrip(".")


def check_known(
    known: Mapping[str, Mapping[str, Any]], runs: Iterable[Planned], place: Place
) -> None:
    """Raise if a known record of a planned run has other settings."""
    unbegun = [run for run in runs if not has_begun(place.out / run.folder)]
    differing = different(Records(place.out, known), unbegun, place)
    if differing:
        raise ConfigError(
            f"--known has other settings for runs of this stage. {count_of(differing)} Give the "
            "same settings here, or leave these records out."
        )


def different(
    records: Records, runs: Iterable[Planned], place: Place, ignored: Collection[str] = ()
) -> dict[str, str]:
    """Return how runs that are found differ from the planned ones, by their folders.

    Settings that are ``ignored`` may differ.
    """
    found = {}
    for run in runs:
        there = records.found_settings(run, place)
        if there is None:
            continue
        here = wanted(run, place).to_dict()
        compared = {key: value for key, value in here.items() if key not in ignored}
        differ = differences(there.to_dict(), compared)
        if differ:
            found[run.folder] = ", ".join(differ)
    return found


def count_of(differing: Mapping[str, str]) -> str:
    """Return how many runs differ, and how the first one does, as sentences."""
    folder, differ = next(iter(differing.items()))
    return f"Runs: {len(differing)}. The first is {folder}: {differ}."


def check_one_data(records: Records, runs: Iterable[Planned]) -> None:
    """Raise if finished runs learned from different data. Their losses can't be compared."""
    by_hash: dict[str, str] = {}
    for run in runs:
        about = (records.finished(run) or {}).get("data")
        if isinstance(about, dict) and "sha256" in about:
            by_hash.setdefault(about["sha256"], run.folder)
    if len(by_hash) > 1:
        first, second, *_ = by_hash.values()
        raise ConfigError(
            f"the runs learned from different data, for example {first} and {second}. Did the file "
            "change? Take another folder, or delete the runs of one of the two."
        )


def restore(records: Records, runs: Iterable[Planned], place: Place) -> None:
    """Write the known records of runs into their folders, so that they are not trained again.

    A run that has begun in its folder stays as it is.
    """
    with _alone(records.out):
        for run in runs:
            line = records.known.get(run.folder)
            folder = records.out / run.folder
            found = records.found_settings(run, place)
            if line is None or found is None or has_begun(folder):
                continue
            folder.mkdir(parents=True, exist_ok=True)
            # The settings come first: a kill in between leaves a run that is trained.
            files.write_json(folder / CONFIG, line.get("config", found.to_dict()))
            if line["status"] == FINISHED:
                record = {key: value for key, value in line.items() if key != "run"}
                files.write_json(folder / RECORD, record)
            else:
                _atomic.write(folder / DIVERGED, b"as in an earlier sweep\n")


def merge(path: Path, made: Iterable[Mapping[str, Any]]) -> None:
    """Write the lines of runs into a file. Lines of other runs stay. A damaged file raises.

    Several sweeps may write into one file.
    """
    with _alone(path.parent):
        by_run = _by_run(path)
        for line in made:
            old = by_run.get(line["run"])
            if old is None or _replaces(line, old):
                by_run[line["run"]] = line
        text = "".join(f"{json.dumps(line)}\n" for line in by_run.values())
        _atomic.write(path, text.encode())


@contextmanager
def _alone(out: Path) -> Generator[None]:
    """Keep other sweeps from the files of a folder inside this context."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out / LOCK, timeout=PATIENCE):
            yield
    except Timeout:
        raise ConfigError(
            f"{out / LOCK} is locked for more than {PATIENCE} s. Does another sweep hang there?"
        ) from None


def _replaces(line: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """Return whether a line takes the place of an earlier one of its run.

    What has not finished does not replace what has ended. A run that diverged keeps the line with
    the commit at which it did.
    """
    status = line.get("status")
    if status == NOT_FINISHED:
        return old.get("status") == NOT_FINISHED
    if status == HAS_DIVERGED and old.get("status") == HAS_DIVERGED:
        return line["settings"] != old.get("settings")
    return True


def _by_run(path: Path) -> dict[str, Mapping[str, Any]]:
    """Return the lines of a file by the run of each."""
    if not path.is_file():
        return {}
    try:
        made = [json.loads(text) for text in path.read_text("utf-8").splitlines()]
        return {line["run"]: line for line in made}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise files.Damaged(
            f"{path} is damaged: a line of it is no record of a run. Delete the line, or the file."
        ) from None
