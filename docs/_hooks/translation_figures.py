"""Draw the figures of the translation page from committed records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from translation_numbers import searched, step_ms, tuned

from cwy._atomic import write
from cwy._figures import NARROW, STYLE, WIDE, Layout, legend_columns, svg

HEIGHT = 3.4
"""Of a row of panes, in inches."""


@dataclass(frozen=True)
class Line:
    """Describe one line of a figure: the word of its runs, its label, color and mark."""

    word: str
    label: str
    color: str
    marker: str


NETWORKS = (
    Line("lstm", "LSTM", "#626a75", "s"),
    Line("gru", "GRU", "#a6761d", "D"),
    Line("cwy-256-tanh-gate-thin", "cwy, L = 256, gate", "#1f7fd6", "o"),
    Line("cwy-512-tanh-gate-thin", "cwy, L = 512, gate", "#d6467a", "^"),
)
BY_PRECISION = {
    "float32": [one for one in NETWORKS if one.word in ("lstm", "cwy-256-tanh-gate-thin")],
    "bfloat16": list(NETWORKS),
}
"""The networks that were trained in each precision."""
NONLINEARITIES = (
    Line("abs", "abs, as in the paper", "#626a75", "s"),
    Line("relu", "ReLU", "#1f7fd6", "o"),
    Line("leaky_relu", "leaky ReLU", "#d6467a", "^"),
)
REFLECTIONS = (64, 128, 256, 512, 1024)


def training(layout: Layout) -> Figure:
    """Draw the loss on validation pairs after each epoch, over the time of its training steps."""
    figure, panes = _panes(layout, len(BY_PRECISION))
    for axes, (precision, networks) in zip(panes, BY_PRECISION.items(), strict=True):
        for network in networks:
            _train(axes, network, precision)
        axes.set_title(precision, loc="left", fontweight="bold")
        axes.set_xlabel("seconds of training steps on an H200")
        # The first epoch of an LSTM would squeeze the others flat.
        axes.set_ylim(1.05, 1.6)
        axes.set_xlim(left=0)
    panes[0].set_ylabel("validation loss, nats per word")
    _finish(figure, panes, layout)
    return figure


def _train(axes: Axes, network: Line, precision: str) -> None:
    """Draw each seed thin, and the mean as far as every seed has come."""
    found = searched(network.word, precision).runs
    ms = step_ms(network.word, "graph", precision)
    curves = []
    for run in found:
        steps, losses = run.curve("validation", "loss", "step")
        seconds = [step * ms / 1000 for step in steps]
        axes.plot(seconds, losses, color=network.color, linewidth=0.8, alpha=0.45)
        curves.append((seconds, losses))
    count = min(len(losses) for _, losses in curves)
    mean_seconds = np.mean([seconds[:count] for seconds, _ in curves], axis=0)
    mean_losses = np.mean([losses[:count] for _, losses in curves], axis=0)
    axes.plot(
        mean_seconds,
        mean_losses,
        color=network.color,
        linewidth=2,
        marker=network.marker,
        markersize=5,
        label=network.label,
    )


def reflections(layout: Layout) -> Figure:
    """Draw the test loss over the number of reflections, the mean with the range."""
    figure, panes = _panes(layout, 1)
    axes = panes[0]
    for place, one in enumerate(NONLINEARITIES):
        losses = [tuned(f"cwy-{count}-{one.word}").last("loss") for count in REFLECTIONS]
        means = [loss.mean for loss in losses]
        below = [loss.mean - loss.low for loss in losses]
        above = [loss.high - loss.mean for loss in losses]
        # Ranges must not cover each other.
        aside = 1.03 ** (place - 1)
        axes.errorbar(
            [count * aside for count in REFLECTIONS],
            means,
            yerr=[below, above],
            color=one.color,
            marker=one.marker,
            markersize=5,
            linewidth=1.8,
            capsize=3,
            label=one.label,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(REFLECTIONS, [str(count) for count in REFLECTIONS])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="reflections, L", ylabel="test loss, nats per word")
    _finish(figure, panes, layout)
    return figure


def _panes(layout: Layout, count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with panes next to each other or, on phones, below each other."""
    rows = 1
    columns = count
    if layout.stacked:
        rows = count
        columns = 1
    figure = Figure(figsize=(layout.width, 0.4 + HEIGHT * rows), layout="constrained")
    panes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    return figure, list(panes.flat)


def _finish(figure: Figure, panes: list[Axes], layout: Layout) -> None:
    """Add a grid to each pane, and one legend below, from the last one."""
    for axes in panes:
        axes.grid(which="major", color="#8a94a3", alpha=0.25, linewidth=0.7)
    handles, labels = panes[-1].get_legend_handles_labels()
    columns = legend_columns(labels, layout)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


FIGURES: dict[str, Callable[[Layout], Figure]] = {
    "training": training,
    "reflections": reflections,
}


def draw(folder: Path) -> None:
    """Write each figure as ``NAME.svg``, and for phones as ``NAME-narrow.svg``."""
    for name, made in FIGURES.items():
        for layout, file in ((WIDE, f"{name}.svg"), (NARROW, f"{name}-narrow.svg")):
            with rc_context(STYLE):
                figure = made(layout)
            write(folder / file, svg(figure).encode())
