"""How a task is reported: its curves, its columns, published numbers, and its finding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from .runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Config = dict[str, Any]


@dataclass(frozen=True)
class Baseline:
    """Describe a level to compare the curves with, such as that of a model without memory."""

    label: str
    value: Callable[[Config], float]
    form: Callable[[float], str] = lambda value: f"{value:.3g}"


@dataclass(frozen=True)
class Curve:
    """Describe one figure: a logged metric over iterations, or along another logged quantity.

    Labels carry the units. A scale is "linear", "log", or, for an accuracy, "logit". ``overlay``
    draws what else belongs there.
    """

    name: str
    metric: str
    label: str
    split: str = "train"
    along: str = "step"
    along_label: str = "iteration"
    scale: str = "linear"
    along_scale: str = "linear"
    baseline: Baseline | None = None
    overlay: Callable[[Axes, Sequence[Series]], None] | None = None


@dataclass(frozen=True)
class Column:
    """Describe one number per run, tabulated over seeds.

    ``absent`` is shown for None once the runs have ended. ``against`` names a method. The number is
    then divided by the mean over that method's runs in the panel, of those that ended if any did.
    """

    heading: str
    value: Callable[[Run], float | None]
    form: Callable[[float], str] = lambda value: f"{value:.3g}"
    absent: str = "–"
    against: str | None = None


def crossing_column(level: float) -> Column:
    """Return the column with the first iteration whose training loss is under a level."""
    return Column(
        f"training loss under {level:g} at iteration",
        lambda run: run.crossing(level),
        lambda step: f"{step:,.0f}",
        "never",
    )


class Picture(NamedTuple):
    """Hold an image: the end of its file name, its bytes, and what it shows, in words."""

    name: str
    content: bytes
    text: str


@dataclass(frozen=True)
class Series:
    """Hold runs that differ only by their seed."""

    label: str
    runs: list[Run]

    @property
    def method(self) -> str:
        """Return the name of the method."""
        return self.runs[0].method

    @property
    def config(self) -> Config:
        """Return the settings of the first seed."""
        return self.runs[0].config

    @property
    def count(self) -> str:
        """Return how many seeds there are, in words. The same seed twice counts once."""
        seeds = len({run.seed for run in self.runs})
        if seeds == len(self.runs):
            return f"{seeds} seeds"
        plural = "s" * (seeds > 1)
        return f"{len(self.runs)} runs of {seeds} seed{plural}"


@dataclass(frozen=True)
class Description:
    """Describe how a task is reported.

    Args:
        title: the task's name in words.
        panels: the settings that decide what is drawn together, with their letters. A setting
            with the letter "" is named only by its value.
        parts: settings of a part that a run may lack, each with the setting that adds the part.
        curves: the figures of a panel.
        columns: the numbers of the summary.
        finding: returns one sentence on what a panel's finished series show.
        published: returns what was published of a method with such settings, if anything.
        about: one or two sentences on the task and the published claim.
        pictures: returns images of a panel's series.
    """

    title: str
    curves: tuple[Curve, ...]
    columns: tuple[Column, ...]
    about: str
    finding: Callable[[Sequence[Series]], str]
    panels: dict[str, str] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    published: Callable[[Config], str | None] = lambda config: None
    pictures: Callable[[Sequence[Series]], list[Picture]] = lambda series: []


PLAIN = Description(
    title="",
    curves=(Curve("loss", "loss", "training loss"),),
    columns=(Column("final loss", lambda run: run.last("train", "loss")),),
    about="",
    finding=lambda series: ", ".join(
        f"{one.label} ends at a loss of {one.runs[0].last('train', 'loss'):.3g}" for one in series
    ),
)
"""The description of a task that is not known."""


def describe(task: str) -> Description:
    """Return the description of a task, from ``report.py`` in the task's folder."""
    from ..engine.task import HOMES

    if task not in HOMES:
        return replace(PLAIN, title=task)
    return import_module(f"...{HOMES[task]}.report", __name__).DESCRIPTIONS[task]
