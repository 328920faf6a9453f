"""What a task tells the report: which curves to draw, what to tabulate, what is published, and how to say what was found."""

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
    """A level that the curves are held against, from the settings: what a model without memory reaches, say."""

    label: str
    value: Callable[[Config], float]
    form: Callable[[float], str] = lambda value: f"{value:.3g}"


@dataclass(frozen=True)
class Curve:
    """One figure: a logged metric over iterations, or along another logged quantity.

    Labels carry the units; a scale is "linear", "log", or, for an accuracy, "logit". ``overlay`` draws what else belongs there.
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
    """One number a run, tabulated over its seeds; ``absent`` stands for None once the runs have ended.

    ``against`` names a method: the number is then divided by the mean over that method's runs in the same panel, of those that
    ended if any did.
    """

    heading: str
    value: Callable[[Run], float | None]
    form: Callable[[float], str] = lambda value: f"{value:.3g}"
    absent: str = "–"
    against: str | None = None


class Picture(NamedTuple):
    """An image that is shown as it is: the end of its file name, its bytes, and what it shows, in words."""

    name: str
    content: bytes
    text: str


@dataclass(frozen=True)
class Series:
    """Runs that differ by their seed alone."""

    label: str
    runs: list[Run]

    @property
    def method(self) -> str:
        """The method's name."""
        return self.runs[0].method

    @property
    def config(self) -> Config:
        """The settings, of the first seed."""
        return self.runs[0].config

    @property
    def count(self) -> str:
        """How many seeds there are; the same one twice is no second seed."""
        seeds = len({run.seed for run in self.runs})
        return (
            f"{seeds} seeds"
            if seeds == len(self.runs)
            else f"{len(self.runs)} runs of {seeds} seed{'s' * (seeds > 1)}"
        )


@dataclass(frozen=True)
class Description:
    """How a task is reported.

    Args:
        title: the task's name in words.
        panels: the settings that set apart what is drawn and tabulated together, with the letters they go by; "" for those
            that are named by their value alone.
        curves: the figures of a panel.
        columns: the numbers of the summary.
        finding: one sentence on what a panel's series show, true for their numbers; of runs that ended.
        published: what was published of a method with such settings, if anything.
        about: one or two sentences on the task and the published claim.
        pictures: what a panel's series show beside the curves.
    """

    title: str
    curves: tuple[Curve, ...]
    columns: tuple[Column, ...]
    about: str
    finding: Callable[[Sequence[Series]], str]
    panels: dict[str, str] = field(default_factory=dict)
    published: Callable[[Config], str | None] = lambda config: None
    pictures: Callable[[Sequence[Series]], list[Picture]] = lambda series: []


# Until a task says more.
PLAIN = Description(
    title="",
    curves=(Curve("loss", "loss", "training loss"),),
    columns=(Column("final loss", lambda run: run.last("train", "loss")),),
    about="",
    finding=lambda series: ", ".join(
        f"{one.label} ends at a loss of {one.runs[0].last('train', 'loss'):.3g}" for one in series
    ),
)


def describe(task: str) -> Description:
    """The description of a task, from ``report.py`` in the task's folder; of an unknown task, its training loss."""
    from ..engine.task import HOMES

    if task not in HOMES:
        return replace(PLAIN, title=task)
    return import_module(f"...{HOMES[task]}.report", __name__).DESCRIPTIONS[task]
