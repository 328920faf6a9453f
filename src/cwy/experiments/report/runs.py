"""Run folders, read back: what was set, what was logged, and, once a run has ended, its record."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

from ...terminal import printable
from ..engine import files
from ..engine.config import check_type
from ..engine.run import CONFIG, RECORD, Folder

LARGEST = 1e100
"""The largest number that is shown or drawn."""
LONGEST_NAME = 80
NUMBER = (int, float)
KINDS: dict[str, tuple[type, ...]] = {
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
    "data": (dict,),
    "best": (dict, NoneType),
}
"""The types of what the report shows of a record."""


class ReportError(RuntimeError):
    """A run folder that is not there or can't be read; says which, and why."""


@dataclass(frozen=True)
class Run:
    """One run: its settings, its logged rows in order, and its record; None while it has not ended."""

    folder: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    record: dict[str, Any] | None

    @property
    def task(self) -> str:
        """The task's name."""
        return self.config["task"]

    @property
    def method(self) -> str:
        """The method's name."""
        return self.config["method"]

    @property
    def seed(self) -> int:
        """The seed."""
        return self.config["seed"]

    @property
    def status(self) -> str:
        """ "finished", "unfinished" or "diverged"."""
        if self.record:
            return self.record["status"]
        return "diverged" if Folder(self.folder).diverged else "unfinished"

    @cached_property
    def steps(self) -> int:
        """Iterations done."""
        return max((row["step"] for row in self.metrics), default=0)

    @cached_property
    def total(self) -> int | None:
        """Iterations up to the end, by its settings; None while they do not tell."""
        if "epochs" not in self.config:
            return self.config.get("iterations")
        epoch = max((row.get("epoch", 0.0) for row in self.metrics), default=0.0)
        return round(self.steps * self.config["epochs"] / epoch) if epoch else None

    @cached_property
    def seconds(self) -> float:
        """Training time so far."""
        return (
            self.record["seconds"]
            if self.record
            else max((row.get("seconds", 0.0) for row in self.metrics), default=0.0)
        )

    def curve(
        self, split: str, metric: str, along: str = "step"
    ) -> tuple[list[float], list[float]]:
        """The logged values of a metric, and where on the other axis each was taken."""
        rows = [
            row
            for row in self.metrics
            if row["split"] == split and _shows(row, metric) and _shows(row, along)
        ]
        return [row[along] for row in rows], [row[metric] for row in rows]

    def last(self, split: str, metric: str) -> float | None:
        """The last logged value of a metric; None if there is none."""
        values = self.curve(split, metric)[1]
        return values[-1] if values else None

    def best(self, split: str, metric: str) -> float | None:
        """The highest logged value of a metric; None if there is none."""
        return max(self.curve(split, metric)[1], default=None)

    def crossing(self, level: float) -> int | None:
        """The first iteration with a training loss at or under the level: the record's, or of the rows logged so far."""
        recorded = (self.record or {}).get("crossings", {})
        if f"{level:g}" in recorded:
            return recorded[f"{level:g}"]
        steps, values = self.curve("train", "loss")
        return next(
            (int(step) for step, value in zip(steps, values, strict=True) if value <= level), None
        )


def read_run(folder: Path) -> Run:
    """The run in a folder; a damaged file, or one with values that no run has, raises by name."""
    place, path = Folder(folder), folder / CONFIG
    try:
        config, metrics = files.read_json(path), place.rows()
        record = place.record() if (folder / RECORD).exists() else None
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


def _shows(row: dict[str, Any], name: str) -> bool:
    """Whether a row has a number of this name that can be drawn."""
    value = row.get(name)
    return value is not None and abs(value) <= LARGEST


def _check_config(config: dict[str, Any]) -> None:
    """Raise unless the settings are plain values, and of the types that their task has."""
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
    """Raise unless what the report shows of a record is of the right types."""
    for key, kinds in KINDS.items():
        if key in record and not isinstance(record[key], kinds):
            raise ValueError(f"{key} is of the wrong type.")
        _check_number(key, record.get(key))
    best = record.get("best") or {}
    if best and not isinstance(best.get("metric"), str):
        raise ValueError("the metric of its best must be a name.")
    for key, value in {
        **record.get("crossings", {}),
        **{k: v for k, v in best.items() if k != "metric"},
    }.items():
        if not isinstance(value, int | float | None):
            raise ValueError(f"{key} must be a number.")
        _check_number(key, value)
    for key, value in {
        **record.get("versions", {}),
        "part": record.get("data", {}).get("part"),
    }.items():
        if not isinstance(value, str | None):
            raise ValueError(f"{key} must be a text.")


def _check_number(key: str, value: Any) -> None:
    # Written so that a NaN is refused.
    if isinstance(value, int | float) and not abs(value) <= LARGEST:
        raise ValueError(f"{key} is not finite, or too large.")


def _spelled(found: Any) -> Any:
    """Spell out control characters in every text of some JSON, its keys included."""
    if isinstance(found, str):
        return printable(found)
    if isinstance(found, list):
        return [_spelled(one) for one in found]
    if isinstance(found, dict):
        return {printable(key): _spelled(value) for key, value in found.items()}
    return found
