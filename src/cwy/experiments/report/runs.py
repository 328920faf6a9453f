"""Run folders, read back: what was set, what was logged, and, once a run has ended, its record."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..engine import files
from ..engine.run import CONFIG, RECORD, Folder


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
        return self.record["seconds"] if self.record else max((row.get("seconds", 0.0) for row in self.metrics), default=0.0)

    def curve(self, split: str, metric: str, along: str = "step") -> tuple[list[float], list[float]]:
        """The logged values of a metric, and where on the other axis each was taken."""
        rows = [
            row for row in self.metrics if row["split"] == split and row.get(metric) is not None and row.get(along) is not None
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
        return next((int(step) for step, value in zip(steps, values, strict=True) if value <= level), None)


def read_run(folder: Path) -> Run:
    """The run in a folder; a damaged file raises by name."""
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
    return Run(folder, config, metrics, record)
