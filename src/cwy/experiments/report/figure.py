"""The figures: every seed thin, their mean thick and with marks, the baseline dashed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from ..._figures import INK, STYLE, WIDE, Layout, legend_columns
from .describe import Curve, Series
from .panels import Panel

# matplotlib is imported where something is drawn: tables and colors do without.
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

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
MORE_COLORS = (
    "#d95f02",
    "#1b9e77",
    "#e7298a",
    "#7570b3",
    "#66a61e",
    "#a6761d",
    "#17becf",
    "#e6ab02",
    "#b2182b",
    "#4393c3",
    "#8c6bb1",
    "#35978f",
)
"""The colors of further variants of a method, which differ from those of the other methods."""
MARKERS = "osD^vP*X<>hp"
MARKS = 7
"""How many marks a curve has."""
ARROW = 8
"""The width of an arrow and the gap next to it, in points."""
ACCURACIES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995)


def draw(panel: Panel, curve: Curve, layout: Layout = WIDE) -> Figure:
    """Draw a panel's figure of one metric."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        shown = panel.drawn(curve)
        above = {name: _above(highest) for name, highest in outliers(curve, shown).items()}
        height = _height(shown, above, layout)
        figure = Figure(figsize=(layout.width, height), layout="constrained")
        axes = figure.subplots()
        axes.set(xlabel=curve.along_label, ylabel=curve.label)
        axes.set_xscale(curve.along_scale)
        axes.set_yscale(curve.scale)
        for series, style in zip(shown, styles(shown), strict=True):
            _curves(axes, curve, series, style, seeds=not layout.stacked)
        if above:
            _limit(axes, curve, shown, above)
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
        columns = legend_columns(axes.get_legend_handles_labels()[1], layout)
        legend = figure.legend(loc="outside lower center", ncols=columns, frameon=False)
        for text in legend.get_texts():
            # A dollar in a name begins no formula.
            text.set_parse_math(False)
            text.set_text(_wrapped(text.get_text(), layout))
    return figure


def _above(highest: float) -> str:
    return f", above the axis: up to {highest:,.4g}"


def _limit(axes: Axes, curve: Curve, shown: Sequence[Series], above: Mapping[str, str]) -> None:
    """End the y axis below the highest curves, so that the others are not squeezed flat.

    ``above`` has what is added to the labels of the highest.
    """
    low = min(min(_values(curve, one), default=math.inf) for one in shown)
    others = [one for one in shown if one.label not in above]
    high = max(max(_values(curve, one), default=low) for one in others)
    if curve.scale == "log":
        margin = (high / low) ** 0.06
        axes.set_ylim(low / margin, high * margin)
    else:
        margin = 0.06 * (high - low)
        axes.set_ylim(low - margin, high + margin)
    places = {name: place for place, name in enumerate(above)}
    for line in axes.get_lines():
        name = str(line.get_gid()).removeprefix("series ")
        label = str(line.get_label())
        if name not in above:
            continue
        if not label.startswith("_"):
            line.set_label(label + above[name])
        if np.min(line.get_ydata()) > axes.get_ylim()[1]:
            _point_up(axes, line, places[name])


def _point_up(axes: Axes, line: Line2D, place: int) -> None:
    """Show a curve that is wholly above the axis by arrows at the axis' end.

    The arrows of the series at a later ``place`` are next to those of the one before.
    """
    from matplotlib.transforms import ScaledTranslation

    top = axes.get_ylim()[1]
    line.set_ydata(np.full_like(line.get_xdata(), top, dtype=float))
    line.set(linestyle="none", marker="^", clip_on=False)
    inches = place * ARROW / 72
    aside = ScaledTranslation(inches, 0, axes.figure.dpi_scale_trans)
    line.set_transform(axes.transData + aside)


def outliers(curve: Curve, shown: Sequence[Series]) -> dict[str, float]:
    """Return series with their highest values, if these would take over half of the y axis.

    They are fewer than half of the series. A figure with a baseline has none.
    """
    found: dict[str, float] = {}
    if curve.scale == "logit" or curve.baseline:
        return found
    heights = {one.label: _values(curve, one) for one in shown}
    heights = {label: values for label, values in heights.items() if values}
    highest_of = {label: max(values) for label, values in heights.items()}
    if curve.scale == "log":
        heights = {label: np.log(values).tolist() for label, values in heights.items()}
    ranked = sorted(highest_of, key=highest_of.__getitem__)
    while len(ranked) > len(shown) / 2 + 1:
        highest = ranked.pop()
        high = max(heights[ranked[-1]])
        low = min(min(heights[label]) for label in ranked)
        if high == low or max(heights[highest]) - high <= high - low:
            break
        found[highest] = highest_of[highest]
    return found


def _values(curve: Curve, series: Series) -> list[float]:
    """Return what is drawn of a series: finite and, on a logarithmic axis, positive."""
    found = []
    for run in series.runs:
        found += run.curve(curve.split, curve.metric, curve.along)[1]
    lowest = -math.inf
    if curve.scale == "log":
        lowest = 0
    return [value for value in found if math.isfinite(value) and value > lowest]


def _wrapped(label: str, layout: Layout) -> str:
    """Break a label that is longer than a line of the legend."""
    return fill(label, layout.letters - 4, subsequent_indent="  ")


def _height(shown: Sequence[Series], above: Mapping[str, str], layout: Layout) -> float:
    """Return the height of a figure, so that a long legend takes no room from the curves."""
    height = 3.3 + 0.17 * layout.width
    # The count of seeds and the baseline are part of the legend.
    labels = [f"{one.label} (3 seeds){above.get(one.label, '')}" for one in shown] + ["baseline"]
    lines = sum(_wrapped(label, layout).count("\n") + 1 for label in labels)
    return height + 0.245 * (math.ceil(lines / legend_columns(labels, layout)) - 1)


def styles(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Return a color and a mark per series. The first of a method has the method's color."""
    taken = [COLORS[one.method] for one in series if one.method in COLORS]
    seen: set[str] = set()
    found = []
    for place, one in enumerate(series):
        width = 1.8
        if one.method in ("cwy", "tcwy") and one.method not in seen:
            width = 2.4
        color = COLORS.get(one.method)
        if color is None or one.method in seen:
            color = max(MORE_COLORS, key=lambda one: _distance(one, taken))
            taken.append(color)
        seen.add(one.method)
        marker = MARKERS[place % len(MARKERS)]
        found.append({"color": color, "linewidth": width, "marker": marker})
    return found


def _distance(color: str, others: Sequence[str]) -> float:
    """Return how far a color is from the nearest of others, in red, green and blue."""
    parts = [bytes.fromhex(one[1:]) for one in (color, *others)]
    apart = [math.dist(parts[0], other) for other in parts[1:]]
    return min(apart, default=math.inf)


def _curves(axes: Axes, curve: Curve, series: Series, style: dict[str, Any], seeds: bool) -> None:
    """Draw the mean of a series with marks and, if asked, each of its seeds."""
    curves = [run.curve(curve.split, curve.metric, curve.along) for run in series.runs]

    def line(x: Sequence[float], y: Sequence[float], **style: Any) -> None:
        axes.plot(x, y, gid=f"series {series.label}", markersize=5, **style)

    if len(curves) == 1:
        x, y = curves[0]
        line(x, y, label=series.label, markevery=_marked(x, series.label), **style)
        return
    for x, y in curves:
        if not seeds:
            break
        thin = {**style, "linewidth": 0.8, "alpha": 0.45}
        if len(x) > 1:
            # A line of one point is invisible without its mark.
            thin["marker"] = None
        line(x, y, **thin)
    # The mean over seeds, as far as every seed has come.
    begin = max(x[0] for x, _ in curves if x)
    end = min(x[-1] for x, _ in curves if x)
    common = [at for at in curves[0][0] if begin <= at <= end]
    values = np.array([np.interp(common, x, y) for x, y in curves if x])
    mean = values.mean(0)
    if curve.scale == "log":
        mean = np.exp(np.log(np.maximum(values, 1e-300)).mean(0))
    label = f"{series.label} ({series.count})"
    line(common, mean.tolist(), label=label, markevery=_marked(common, series.label), **style)


def _marked(x: Sequence[float], label: str) -> list[int]:
    """Return which points have a mark: a few, at places that differ between series."""
    if len(x) <= MARKS:
        return list(range(len(x)))
    every = len(x) / MARKS
    start = (sum(map(ord, label)) % MARKS) / MARKS
    return sorted({int((start + i) * every) for i in range(MARKS)})


def _ticks(axes: Axes, curve: Curve) -> None:
    from matplotlib.ticker import (
        FixedLocator,
        FuncFormatter,
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
            axis.set_major_formatter(FuncFormatter(lambda value, _: _plainly(value)))
            axis.set_minor_formatter(NullFormatter())


def _plainly(value: float) -> str:
    """Write a number without an exponent in small letters, which a phone shows too small."""
    if 1e-4 <= value < 1e6:
        return f"{value:,g}"
    digits, power = f"{value:e}".split("e")
    return f"{float(digits):g}e{int(power)}"


def inline(drawn: str, name: str, text: str, kind: str) -> Markup:
    """Return an SVG as an element of a page, with the page's color and font and its own ids.

    ``kind`` is the class of the element, "wide" or "narrow".
    """
    drawn = re.sub(r"<style>.*?</style>", "", drawn, flags=re.DOTALL)
    drawn = drawn.replace("var(--ink)", "currentColor")
    drawn = drawn.replace("system-ui, sans-serif", "var(--font)")
    drawn = re.sub(r'(id="|url\(#|href="#)', lambda found: f"{found[1]}{name}--", drawn)
    opened = re.match(r'<svg[^>]*?viewBox="([^"]*)"[^>]*>', drawn)
    assert opened
    tag = Markup('<svg class="{}" viewBox="{}" role="img" aria-label="{}">')
    # Matplotlib escapes the texts that it writes into an SVG.
    return tag.format(kind, opened[1], text) + Markup(drawn[opened.end() :])  # noqa: S704
