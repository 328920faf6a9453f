"""Read run folders: the settings, the log and, once a run has ended, its record."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from ...terminal import printable
from ..engine import files
from ..engine.config import check_type
from ..engine.folder import CONFIG, RECORD, Folder

LARGEST = 1e100
"""The largest number that is shown or drawn."""
LONGEST_NAME = 80
NUMBER = (int, float)
TYPES: dict[str, tuple[type, ...]] = {
    "status": (str,),
    "steps": (int,),
    "seconds": NUMBER,
    "parameters": (int,),
    "peak_memory": (int,),
    "threads": (int,),
    "device": (str,),
    "started": (str,),
    "commit": (str, NoneType),
    "dirty": (bool, NoneType),
    "versions": (dict,),
    "crossings": (dict,),
    "final": (dict,),
    "data": (dict,),
    "best": (dict, NoneType),
}
"""The types of what the report shows of a record."""


class ReportError(RuntimeError):
    """Report a run folder that is missing or unreadable. The message names it and the reason."""


@dataclass(frozen=True)
class Run:
    """Hold one run: its settings, its logged rows in order, and its record once it has ended.

    A sweep restores known runs without their logs. Such a run has no rows and no curves, and its
    numbers are those of the record.
    """

    folder: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    record: dict[str, Any] | None

    def setting(self, key: str) -> Any:
        """Return a setting. One that the run's version did not have has its default."""
        from ..engine.task import HOMES, load

        default = None
        if self.task in HOMES:
            default = getattr(load(self.task).Config, key, None)
        return self.config.get(key, default)

    @property
    def task(self) -> str:
        """Return the name of the task."""
        return self.config["task"]

    @property
    def method(self) -> str:
        """Return the name of the method."""
        return self.config["method"]

    @property
    def seed(self) -> int:
        """Return the seed."""
        return self.config["seed"]

    @property
    def is_only_recorded(self) -> bool:
        """Return whether there is a record, but no log."""
        return bool(self.record) and not self.metrics

    @property
    def _record(self) -> dict[str, Any]:
        return self.record or {}

    def overlaps(self, other: Run) -> bool:
        """Return whether both were trained at the same time, on devices of one kind."""
        if self is other or not self.record or not other.record:
            return False
        if self.record.get("device") != other.record.get("device"):
            return False
        ours = _span(self.record)
        theirs = _span(other.record)
        return ours.begin < theirs.end and theirs.begin < ours.end

    @property
    def status(self) -> str:
        """Return "finished", "unfinished" or "diverged"."""
        if self.record:
            return self.record["status"]
        if Folder(self.folder).diverged:
            return "diverged"
        return "unfinished"

    @cached_property
    def steps(self) -> int:
        """Return the number of iterations done."""
        if self.is_only_recorded:
            return self._record.get("steps", 0)
        return max((row["step"] for row in self.metrics), default=0)

    @cached_property
    def total(self) -> int | None:
        """Return the iterations of the whole run, or None if they are not known yet."""
        if "epochs" not in self.config:
            return self.config.get("iterations")
        epoch = max((row.get("epoch", 0.0) for row in self.metrics), default=0.0)
        if not epoch:
            return None
        return round(self.steps * self.config["epochs"] / epoch)

    @cached_property
    def seconds(self) -> float:
        """Return the training time so far."""
        if self.record:
            return self.record["seconds"]
        return max((row.get("seconds", 0.0) for row in self.metrics), default=0.0)

    def curve(
        self, split: str, metric: str, along: str = "step"
    ) -> tuple[list[float], list[float]]:
        """Return where on the other axis a metric was logged, and its values."""
        rows = [
            row
            for row in self.metrics
            if row["split"] == split and _shows(row, metric) and _shows(row, along)
        ]
        values = [row[metric] for row in rows]
        if split == "train":
            values = _evenly_averaged(rows, values)
        return [row[along] for row in rows], values

    def last(self, split: str, metric: str) -> float | None:
        """Return the last logged or recorded value of a metric, or None."""
        if self.is_only_recorded:
            return self._final(split, metric)
        _, values = self.curve(split, metric)
        if not values:
            return None
        return values[-1]

    def best(self, split: str, metric: str) -> float | None:
        """Return the highest logged or recorded value of a metric, or None."""
        if self.is_only_recorded:
            return self.recorded_at_best(split, metric)
        _, values = self.curve(split, metric)
        return max(values, default=None)

    def recorded_at_best(self, split: str, metric: str) -> float | None:
        """Return a recorded metric of a split at the best evaluation, or None.

        A record has all metrics of the last evaluation, and one of the best evaluation. The others
        are known only if the last evaluation is the best one.
        """
        best = self._record.get("best") or {}
        if best.get("metric") == f"{split} {metric}":
            return best.get("value")
        if not best or best.get("step") != self._record.get("steps"):
            return None
        return self._final(split, metric)

    def _final(self, split: str, metric: str) -> float | None:
        """Return the value of a metric that the record has of the end, or None."""
        row = self._record.get("final", {}).get(split, {})
        if not _shows(row, metric):
            return None
        return row[metric]

    def crossing(self, level: float) -> int | None:
        """Return the first iteration with a training loss at or under the level, or None."""
        recorded = self._record.get("crossings", {})
        if f"{level:g}" in recorded:
            return recorded[f"{level:g}"]
        steps, values = self.curve("train", "loss")
        for step, value in zip(steps, values, strict=True):
            if value <= level:
                return int(step)
        return None


class _Span(NamedTuple):
    """Hold when a run began and ended, in seconds since 1970."""

    begin: float
    end: float


def _span(record: dict[str, Any]) -> _Span:
    try:
        begin = datetime.fromisoformat(record["started"]).timestamp()
    except (KeyError, TypeError, ValueError):
        # A run of unknown time overlaps with none.
        return _Span(math.inf, -math.inf)
    return _Span(begin, begin + record["seconds"])


def read_run(folder: Path) -> Run:
    """Read the run in a folder. A damaged file, or one with impossible values, raises by name."""
    place = Folder(folder)
    path = folder / CONFIG
    record = None
    try:
        config = files.read_json(path)
        metrics = place.rows()
        if (folder / RECORD).exists():
            record = place.record()
    except files.Damaged as damage:
        raise ReportError(str(damage)) from None
    except OSError as error:
        raise ReportError(f"cannot read {error.filename}: {error.strerror}.") from None
    for key in ("task", "method", "seed"):
        if key not in config:
            raise ReportError(f"{path} is not a run's: it has no {key!r}.")
    try:
        _check_config(config)
    except ValueError as error:
        raise ReportError(f"{path} is damaged: {error}") from None
    try:
        _check_record(record or {})
    except ValueError as error:
        raise ReportError(f"{folder / RECORD} is damaged: {error}") from None
    return Run(folder, _spelled(config), metrics, _spelled(record))


def _evenly_averaged(rows: list[dict[str, Any]], values: list[float]) -> list[float]:
    """Return the values, the last of them a mean over as many steps as the one before.

    A row of training is a mean over the steps since the row before. The last row has fewer where
    the steps of a run are no multiple of those between two rows.
    """
    if len(rows) < 3:
        return values
    before, previous, last = (row["step"] for row in rows[-3:])
    usual = previous - before
    final = last - previous
    if not 0 < final < usual:
        return values
    share = final / usual
    return [*values[:-1], share * values[-1] + (1 - share) * values[-2]]


def _shows(row: dict[str, Any], name: str) -> bool:
    """Return whether a row has a number of this name that can be drawn."""
    value = row.get(name)
    return value is not None and abs(value) <= LARGEST


def _check_config(config: dict[str, Any]) -> None:
    """Raise unless the settings are plain values of the types that their task has."""
    from ..engine.task import HOMES, load

    for key, value in config.items():
        if not key.isidentifier() or len(key) > LONGEST_NAME:
            raise ValueError("it has a setting whose name is no word.")
        if isinstance(value, list | dict):
            raise ValueError(f"{key} is no plain value.")
        _check_number(key, value)
    for key in ("task", "method"):
        if not isinstance(config[key], str) or len(config[key]) > LONGEST_NAME:
            raise ValueError(f"{key} must be a name of at most {LONGEST_NAME} characters.")
    if type(config["seed"]) is not int:
        raise ValueError("seed must be a whole number.")
    if config["task"] in HOMES:
        kind = load(config["task"]).Config
        for one in fields(kind):
            if one.name in config:
                check_type(kind, one.name, config[one.name])


def _check_record(record: dict[str, Any]) -> None:
    """Raise unless what the report shows of a record has the right types."""
    for key, types in TYPES.items():
        if key in record and not isinstance(record[key], types):
            raise ValueError(f"{key} is of the wrong type.")
        _check_number(key, record.get(key))
    best = record.get("best") or {}
    if best and not isinstance(best.get("metric"), str):
        raise ValueError("the metric of its best must be a name.")
    numbers = {**record.get("crossings", {}), **best}
    numbers.pop("metric", None)
    for key, value in numbers.items():
        if not isinstance(value, int | float | None):
            raise ValueError(f"{key} must be a number.")
        _check_number(key, value)
    for split, metrics in record.get("final", {}).items():
        if not isinstance(metrics, dict):
            raise ValueError(f"its final {split} must be numbers by name.")
        for key, value in metrics.items():
            if type(value) not in NUMBER:
                raise ValueError(f"its final {split} {key} must be a number.")
    texts = {**record.get("versions", {}), "part": record.get("data", {}).get("part")}
    for key, value in texts.items():
        if not isinstance(value, str | None):
            raise ValueError(f"{key} must be a text.")


def _check_number(key: str, value: Any) -> None:
    # Written so that a NaN is refused.
    if isinstance(value, int | float) and not abs(value) <= LARGEST:
        raise ValueError(f"{key} is not finite, or too large.")


def _spelled(found: Any) -> Any:
    """Spell out control characters in every text and key of some JSON."""
    if isinstance(found, str):
        return printable(found)
    if isinstance(found, list):
        return [_spelled(one) for one in found]
    if isinstance(found, dict):
        return {printable(key): _spelled(value) for key, value in found.items()}
    return found
