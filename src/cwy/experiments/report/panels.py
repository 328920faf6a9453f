"""Runs, sorted into what is shown together: panels of one task and size, in them series of one method and setting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any

from ..engine.files import slug
from .describe import Config, Curve, Description, Series, describe
from .runs import Run
from .words import number, say

# What may differ between two runs of one curve.
INCIDENTAL = {"seed", "recipe", "device", "compile", "log_every", "evaluate_every", "save_every"}
LETTERS = {"hidden_size": "N", "reflections": "L"}
ORDER = (
    "cwy", "tcwy", "hr", "exprnn", "dtriv", "scornn", "urnn", "eurnn", "own", "rgd", "rgd-c-c", "rgd-e-c", "rgd-c-qr",
    "rgd-e-qr", "rgd-adam", "orth-init", "glorot", "zeros", "lstm", "gru", "rnn", "convlstm",
)  # fmt: skip
"""The order of rows and legends; others follow by name."""
LONGEST = 60
"""The most characters of a setting that a legend shows."""


@dataclass(frozen=True)
class Panel:
    """Series that are drawn in the same figures and compared in the same table."""

    task: str
    description: Description
    series: list[Series]
    number: int = 1
    """Which of the panels with the same name in files it is."""

    @property
    def config(self) -> Config:
        """The settings of its first run."""
        return self.series[0].config

    @property
    def title(self) -> str:
        """The task, and what sets this panel apart, as in "Copying, T = 1000"."""
        sizes = (f"{letter} = {value}" if letter else str(value) for letter, value in self._sizes)
        return ", ".join([self.description.title, *sizes])

    @property
    def slug(self) -> str:
        """Its name in file names and links, as in "copying-T1000"."""
        name = slug("-".join([self.task, *(f"{letter}{value}" for letter, value in self._sizes)]))
        return name if self.number == 1 else f"{name}-{self.number}"

    @property
    def _sizes(self) -> list[tuple[str, object]]:
        values = {letter: self.config.get(key) for key, letter in self.description.panels.items()}
        return [(letter, value) for letter, value in values.items() if value is not None]

    @property
    def finding(self) -> str:
        """What the runs that ended show, in a sentence, and which series have none."""
        ended = [
            replace(one, runs=runs)
            for one in self.series
            if (runs := [run for run in one.runs if run.record])
        ]
        told = [self.description.finding(ended)] if ended else []
        left = [one for one in self.series if not any(run.record for run in one.runs)]
        diverged = [one for one in left if all(run.status == "diverged" for run in one.runs)]
        going = [one for one in left if one not in diverged]
        if len(going) > 3:
            told.append(f"{len(going)} others are not finished")
        elif going:
            told.append(say(going, self.series, "is not finished", "are not finished"))
        told += [say(diverged, self.series, "diverged", "diverged")] if diverged else []
        return "; ".join(told)

    @property
    def runs(self) -> list[Run]:
        """Every run."""
        return [run for series in self.series for run in series.runs]

    def drawn(self, curve: Curve) -> list[Series]:
        """The series with something to draw."""
        return [
            one
            for one in self.series
            if any(run.curve(curve.split, curve.metric, curve.along)[0] for run in one.runs)
        ]


def arrange(runs: Iterable[Run]) -> list[Panel]:
    """The panels of these runs, by task and size; in each, the series in the order of ORDER."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        keys = describe(run.task).panels
        groups.setdefault((run.task, *(run.config.get(key) for key in keys)), []).append(run)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], *map(_order, item[0][1:])))
    return _numbered(
        [Panel(key[0], describe(key[0]), _series(members)) for key, members in ordered]
    )


def _order(value: Any) -> tuple[bool, Any]:
    """Numbers before texts; None is 0."""
    return isinstance(value, str), value or 0


def _numbered(panels: list[Panel]) -> list[Panel]:
    """Give panels whose names differ only by what a slug leaves out names of their own."""
    taken: set[str] = set()
    found = []
    for panel in panels:
        while panel.slug.lower() in taken:
            panel = replace(panel, number=panel.number + 1)
        taken.add(panel.slug.lower())
        found.append(panel)
    return found


def _series(runs: Sequence[Run]) -> list[Series]:
    found: dict[str, list[Run]] = {}
    for run in sorted(
        runs,
        key=lambda run: (_rank(run.method), -(run.config.get("reflections") or 1 << 30), run.seed),
    ):
        alike = [other for other in runs if other.method == run.method]
        differ = [
            key
            for key in run.config
            if key not in INCIDENTAL and any(o.config.get(key) != run.config[key] for o in alike)
        ]
        if run.config.get("orthogonal_lr") == run.config.get("lr") and "lr" in differ:
            differ = [key for key in differ if key != "orthogonal_lr"]
        # Rates come last.
        variant = ", ".join(
            _setting(key, run.config[key])
            for key in sorted(differ, key=lambda key: key.endswith("lr"))
        )
        found.setdefault(f"{run.method} ({variant})" if variant else run.method, []).append(run)
    return [Series(label, members) for label, members in found.items()]


def _rank(method: str) -> tuple[int, str]:
    return ORDER.index(method) if method in ORDER else len(ORDER), method


def _setting(key: str, value: object) -> str:
    shown = shorten(str(value), LONGEST, placeholder="…")
    if key == "nonlinearity":
        return shown
    if isinstance(value, float):
        shown = number(value)
    if key == "reflections" and value is None:
        shown = "N"
    return f"{LETTERS.get(key, key)} = {shown}"
