"""The figures: every seed thin, their mean thick, the baseline dashed.

They are PNG and SVG files, and SVG elements of a page.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from .describe import Curve, Series
from .panels import Panel

# matplotlib is imported where something is drawn: tables and colors do without.
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {
    "cwy": "#1f7fd6",
    "tcwy": "#26a6a6",
    "hr": "#6b5fd0",
    "exprnn": "#e08214",
    "dtriv": "#2f9e55",
    "scornn": "#d6467a",
    "urnn": "#9a6dd7",
    "eurnn": "#b8860b",
    "own": "#e08214",
    "rgd": "#a0522d",
    "rgd-c-c": "#d6467a",
    "rgd-e-c": "#9a6dd7",
    "rgd-c-qr": "#b8860b",
    "rgd-e-qr": "#2f9e55",
    "rgd-adam": "#6b5fd0",
    "orth-init": "#1f7fd6",
    "glorot": "#a0522d",
    "zeros": "#9aa2ad",
    "convlstm": "#626a75",
    "lstm": "#7d8590",
    "gru": "#9aa2ad",
    "rnn": "#626a75",
}
"""The color of each method. Torch's own layers are gray.

They are visible on white and on black, and color-blind readers can distinguish them.
"""
DASHES = (
    "solid",
    (0, (5, 1.5)),
    (0, (2, 1.2)),
    (0, (6, 1.5, 1, 1.5)),
    (0, (1, 1)),
    (0, (6, 1.5, 1, 1.5, 1, 1.5)),
)
ACCURACIES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995)
INK = "#3c4451"
STYLE = {
    "font.size": 10.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "cwy",
    "path.simplify_threshold": 0.2,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
    ),
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(panel: Panel, curve: Curve) -> Figure:
    """Draw a panel's figure of one metric."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        shown = panel.drawn(curve)
        figure = Figure(figsize=(7.2, _height(shown)), layout="constrained")
        axes = figure.subplots()
        axes.set(xlabel=curve.along_label, ylabel=curve.label)
        axes.set_xscale(curve.along_scale)
        axes.set_yscale(curve.scale)
        for series, style in zip(shown, styles(shown), strict=True):
            _curves(axes, curve, series, style)
        if curve.baseline:
            level = curve.baseline.value(panel.config)
            label = f"{curve.baseline.label} ({curve.baseline.form(level)})"
            axes.axhline(level, color=INK, linestyle=(0, (4, 3)), linewidth=1.4, label=label)
        if curve.overlay:
            curve.overlay(axes, shown)
        axes.grid(which="major", color="#8a94a3", alpha=0.25, linewidth=0.7)
        axes.set_title(
            panel.title, parse_math=False, loc="left", fontsize="medium", fontweight="bold"
        )
        _ticks(axes, curve)
        columns = _columns(axes.get_legend_handles_labels()[1])
        legend = figure.legend(loc="outside lower center", ncols=columns, frameon=False)
        for text in legend.get_texts():
            # A dollar in a name begins no formula.
            text.set_parse_math(False)
    return figure


def _height(shown: Sequence[Series]) -> float:
    """Return the height of a figure, so that a long legend takes no room from the curves."""
    if not shown:
        return 4.6
    lines = math.ceil(len(shown) / _columns([one.label for one in shown]))
    return 4.6 + 0.21 * max(0, lines - 3)


def styles(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Return a color per method, with dashes for its variants."""
    variants: Counter[str] = Counter()
    found = []
    for one in series:
        variant = variants[one.method]
        variants[one.method] += 1
        width = 1.8
        if one.method in ("cwy", "tcwy") and variant == 0:
            width = 2.4
        found.append(
            {
                "color": COLORS.get(one.method, "#a0522d"),
                "linestyle": DASHES[variant % len(DASHES)],
                "linewidth": width,
            }
        )
    return found


def _curves(axes: Axes, curve: Curve, series: Series, style: dict[str, Any]) -> None:
    curves = [run.curve(curve.split, curve.metric, curve.along) for run in series.runs]

    def line(x: Sequence[float], y: Sequence[float], **style: Any) -> None:
        marker = None
        if len(x) == 1:
            # A line of one point is invisible.
            marker = "o"
        axes.plot(x, y, gid=f"series {series.label}", marker=marker, **style)

    if len(curves) == 1:
        line(*curves[0], label=series.label, **style)
        return
    for x, y in curves:
        line(x, y, **{**style, "linewidth": 0.8, "alpha": 0.45})
    # The mean over seeds, as far as every seed has come.
    begin = max(x[0] for x, _ in curves if x)
    end = min(x[-1] for x, _ in curves if x)
    common = [at for at in curves[0][0] if begin <= at <= end]
    values = np.array([np.interp(common, x, y) for x, y in curves if x])
    mean = values.mean(0)
    if curve.scale == "log":
        mean = np.exp(np.log(np.maximum(values, 1e-300)).mean(0))
    line(common, mean.tolist(), label=f"{series.label} ({series.count})", **style)


def _columns(labels: Sequence[str]) -> int:
    """Return how many columns of a legend fit a figure of some eighty letters.

    The sample of a line takes six letters.
    """
    for columns in range(min(4, len(labels)), 1, -1):
        if sum(6 + max(map(len, part)) for part in np.array_split(np.array(labels), columns)) <= 80:
            return columns
    return 1


def _ticks(axes: Axes, curve: Curve) -> None:
    from matplotlib.ticker import (
        FixedLocator,
        LogLocator,
        NullFormatter,
        NullLocator,
        PercentFormatter,
        StrMethodFormatter,
    )

    for axis, scale in ((axes.xaxis, curve.along_scale), (axes.yaxis, curve.scale)):
        if scale == "linear":
            axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        elif scale == "logit":
            axis.set_major_locator(FixedLocator(ACCURACIES))
            axis.set_major_formatter(PercentFormatter(1, decimals=0))
            axis.set_minor_locator(NullLocator())
        else:
            low, high = axis.get_view_interval()
            # Less than two powers of ten need more numbers than those powers.
            if high < 100 * low:
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axis.set_minor_formatter(NullFormatter())


def png(figure: Figure) -> bytes:
    """Return the figure as a PNG."""
    return _save(figure, "png", dpi=160, metadata={"Software": None})


def svg(figure: Figure) -> str:
    """Return the figure as an SVG that is the same each time."""
    return _save(figure, "svg", metadata={"Date": None, "Creator": None}).decode()


def inline(figure: Figure, name: str, text: str) -> Markup:
    """Return the figure as an element of a page, with the page's color and font and its own ids."""
    for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
        patch.set_visible(False)
    drawn = svg(figure)
    drawn = drawn[drawn.index("<svg") :].replace(INK, "currentColor")
    drawn = re.sub(r'(id="|url\(#|href="#)', lambda found: f"{found[1]}{name}--", drawn)
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r"font: ([^;\"]*?)'DejaVu Sans'[^;\"]*", r"font: \1var(--font)", drawn)
    opened = re.match(r'<svg[^>]*?viewBox="([^"]*)"[^>]*>', drawn)
    assert opened
    tag = Markup('<svg viewBox="{}" role="img" aria-label="{}">').format(opened[1], text)
    # Matplotlib escapes the texts that it writes into an SVG.
    return tag + Markup(drawn[opened.end() :])  # noqa: S704


def _save(figure: Figure, kind: str, **options: Any) -> bytes:
    from matplotlib import rc_context

    content = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(content, format=kind, **options)
    return content.getvalue()
