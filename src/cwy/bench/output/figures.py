"""The results as pictures: lines over sizes where there are several, bars where there is one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import NullFormatter, NullLocator

from ..._atomic import whole, write
from ..._figures import INK, NARROW, STYLE, WIDE, Layout, legend_columns, svg
from ..suites import Size, show_size
from .rows import KINDS, Measurement, Panel, Time, caption
from .tables import Last, are_steps, product, rate, ratios, times

# Colors that color-blind readers can tell apart: Okabe and Ito's for ours, then Tol's "muted".
BLUE = "#0072B2"
SKY = "#88CCEE"
ORANGE = "#E69F00"
OURS = (
    BLUE,
    SKY,
    "#CC6677",
    "#44AA99",
    "#882255",
    "#999933",
    "#AA4499",
    "#117733",
    "#DDCC77",
    "#332288",
)
PEERS = (
    "#666666",
    "#A6761D",
    "#D95F02",
    "#7570B3",
    "#E7298A",
    "#1B9E77",
    "#B2182B",
    "#66A61E",
)
"""The colors of peers: ColorBrewer's "Dark2", and a red. Peers also have open marks and dashes."""
MARKERS = "osD^vP*X<>hdp"
LIMIT = {"color": BLUE, "linestyle": (0, (1, 3)), "linewidth": 1.5}
DASHES = ((0, (5, 2)), (0, (6, 2, 1, 2)), (0, (2, 2)), (0, (9, 2)))


def draw(panel: Panel, title: str, baseline: str, path: Path, means: bool = False) -> None:
    """Draw the sizes of one form into a PNG that appears whole or not at all.

    With ``means`` the lines are means with their standard errors, else medians with quartiles.
    """
    with rc_context(STYLE):
        figure = _figure(panel, baseline, means, WIDE)
        # The legend is below the panes, so the caption is above them.
        figure.suptitle(f"{title}\n{_caption(panel.found)}", fontsize="medium")
        _save(figure, path)


def draw_for_pages(panel: Panel, baseline: str, stem: Path, means: bool = False) -> None:
    """Draw the same for a page that has title and caption: ``stem.svg`` and ``stem-narrow.svg``."""
    for layout, name in ((WIDE, f"{stem.name}.svg"), (NARROW, f"{stem.name}-narrow.svg")):
        with rc_context(STYLE):
            figure = _figure(panel, baseline, means, layout)
        write(stem.with_name(name), svg(figure).encode())


def _figure(panel: Panel, baseline: str, means: bool, layout: Layout) -> Figure:
    if are_steps(panel.found):
        # Modes of a step are many. The figure has the plain calls, and the tables have all.
        plain = [one for one in panel.found if "(" not in one.entry]
        panel = Panel(panel.form, panel.sizes, plain)
    elif len(panel.sizes) > 1:
        return _lines(panel, baseline, means, layout)
    return _bars(panel, baseline, layout)


def draw_all(last: Mapping[str, Last], path: Path) -> None:
    """Draw a line per benchmark: entries by their time as a multiple of ours."""
    figure = Figure(figsize=(9, 1.6 + 0.7 * len(last)), layout="constrained")
    axes = figure.subplots()
    groups = {
        "ours": {"color": SKY, "marker": "o", "label": "other methods of cwy"},
        "peer": {"color": "0.75", "marker": "s", "label": "peers"},
        "floor": {"color": ORANGE, "marker": "D", "label": "free weights"},
    }
    edge: dict[str, Any] = {"linestyle": "none", "markeredgecolor": "0.2"}
    for place, one in enumerate(last.values()):
        for group, style in groups.items():
            at = [ratio for found, ratio in ratios(one) if found == group]
            shown: dict[str, Any] = style | edge | {"label": None}
            axes.plot(at, [place] * len(at), **shown, markersize=8, alpha=0.9)
        axes.plot([1], [place], "o", color=BLUE, markeredgecolor="0.2", markersize=9, zorder=4)
    for style in groups.values():
        axes.plot([], [], **style, **edge)
    axes.plot([], [], color=BLUE, marker="o", label="ours", **edge)
    axes.axvline(1, color="0.5", linewidth=0.8, zorder=0)
    names = [f"{name}: {one.baseline}\nat {one.found[0].size}" for name, one in last.items()]
    axes.set_yticks(range(len(last)), names)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="forward + backward, as a multiple of ours (left is faster)")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    first = next(iter(last.values()))
    figure.supxlabel(_caption(first.found), fontsize="small", color="0.4")
    _save(figure, path)


def _caption(found: Sequence[Measurement]) -> str:
    return caption(found[0].context, found[0].dtype)


def _save(figure: Figure, path: Path) -> None:
    with whole(path) as partial:
        figure.savefig(partial, format="png", dpi=150)


def _spelled_out(form: str, size: Size) -> str:
    named = zip(form.split("x"), size, strict=True)
    return ", ".join(f"{letter} = {value}" for letter, value in named)


@dataclass(frozen=True)
class _Axis:
    """Hold what the lines run along.

    Attributes:
        places: of each size, by its name.
        label: of the axis, empty if other letters vary, too.
        logarithmic: whether the places are values of a letter, N if they can be.
        letter: whose values they are, or the form.
    """

    places: dict[str, int]
    label: str
    logarithmic: bool
    letter: str


def _axis(panel: Panel) -> _Axis:
    letters = panel.form.split("x")
    names = [show_size(size) for size in panel.sizes]
    columns = list(zip(*panel.sizes, strict=True))
    distinct = [i for i, column in enumerate(columns) if len(set(column)) == len(column)]
    for i in distinct:
        others = [j for j in range(len(letters)) if j != i]
        if all(len(set(columns[j])) == 1 for j in others):
            label = letters[i]
            fixed = ", ".join(f"{letters[j]} = {columns[j][0]}" for j in others)
            if fixed:
                label += f" ({fixed})"
            return _Axis(dict(zip(names, columns[i], strict=True)), label, True, letters[i])
    if 0 in distinct:
        return _Axis(dict(zip(names, columns[0], strict=True)), "", True, letters[0])
    return _Axis({name: i for i, name in enumerate(names)}, "", False, panel.form)


def _lines(panel: Panel, baseline: str, means: bool, layout: Layout) -> Figure:
    kinds = ["forward", "both"]
    titles = dict(KINDS)
    if are_steps(panel.found):
        kinds = ["forward"]
        titles["forward"] = "A step"
    if any(one.seconds("both_graph") for one in panel.found):
        kinds.append("both_graph")
        titles["both_graph"] = "Forward + backward, CUDA graph"
    if layout.stacked:
        panes_high = 2.9 * len(kinds)
        grid = (len(kinds), 1)
    else:
        panes_high = 3.6
        grid = (1, len(kinds))
    figure = Figure(layout="constrained")
    panes = figure.subplots(*grid, sharey=True, squeeze=False).flatten()
    axis = _axis(panel)
    styles = _styles(panel.found, baseline)
    unit = "ms per call"
    if panel.form.endswith("T"):
        unit = "µs per step"
    for axes, kind in zip(panes, kinds, strict=True):
        lines = _Lines(panel, axis, kind, means)
        for entry, style in styles.items():
            lines.draw(axes, entry, style)
        lines.draw_limit(axes, baseline)
        _label(axes, axis, crowded=len(kinds) > 2 and not layout.stacked)
        axes.set_title(titles[kind])
        if layout.stacked or axes is panes[0]:
            axes.set_ylabel(unit)
    panes[0].yaxis.set_major_formatter("{x:g}")
    legend_high = 0.24 * _legend(figure, panes[0], panel, layout)
    figure.set_size_inches(layout.width, 0.6 + panes_high + legend_high)
    return figure


def _label(axes: Axes, axis: _Axis, crowded: bool) -> None:
    ticks = list(axis.places.values())
    apart = 1.3
    if crowded and len(ticks) > 6:
        apart = 2.2
    elif crowded:
        apart = 1.9
    axes.set(yscale="log", xlabel=axis.label or axis.letter.replace("x", " × "))
    if axis.logarithmic:
        axes.set_xscale("log")
        axes.set_xticks(ticks, _apart(ticks, apart))
    else:
        axes.set_xscale("linear")
        axes.set_xticks(ticks, [name.replace("x", "\n× ") for name in axis.places])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(which="major", alpha=0.3)


def _legend(figure: Figure, axes: Axes, panel: Panel, layout: Layout) -> int:
    """List the entries, the slowest at the last size first. Return the lines of the list."""
    handles, labels = axes.get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    last = {one.entry: one.ranked or 0 for one in panel.at(panel.sizes[-1])}
    slowest_first = sorted(by_label, key=lambda entry: -last.get(entry, 0))
    columns = legend_columns(slowest_first, layout)
    figure.legend(
        [by_label[entry] for entry in slowest_first],
        slowest_first,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
    )
    return math.ceil(len(slowest_first) / columns)


@dataclass(frozen=True)
class _Lines:
    """Draw the lines of one kind of time."""

    panel: Panel
    axis: _Axis
    kind: str
    means: bool

    def unit(self, size: str) -> float:
        """Return what turns seconds into the unit of the axis."""
        if not self.panel.form.endswith("T"):
            return 1e3
        # A recurrence is drawn by the time of one step.
        steps = int(size.rpartition("x")[2])
        return 1e6 / steps

    def draw(self, axes: Axes, entry: str, style: dict[str, Any]) -> None:
        places = []
        middles = []
        whiskers = []
        timed = [one for one in self.panel.found if one.entry == entry]
        for one in sorted(timed, key=lambda one: self.axis.places[one.size]):
            time = one.standing(self.kind)
            if time is not None:
                unit = self.unit(one.size)
                whisker = _whisker(time, self.means)
                places.append(self.axis.places[one.size])
                middles.append(whisker.middle * unit)
                whiskers.append((whisker.below * unit, whisker.above * unit))
        below = [down for down, _ in whiskers]
        above = [up for _, up in whiskers]
        axes.errorbar(places, middles, yerr=[below, above], label=entry, **style)

    def draw_limit(self, axes: Axes, baseline: str) -> None:
        bound = limit(self.panel.found, baseline, self.kind)
        if bound:
            at = [self.axis.places[size] for size in bound]
            values = [seconds * self.unit(size) for size, seconds in bound.items()]
            axes.plot(at, values, label=f"{baseline} at the product's rate", **LIMIT)


def _apart(values: Sequence[int], ratio: float) -> list[str]:
    """Label ticks of a logarithmic axis. A label that would touch the one before is left out."""
    labels = []
    last = 0.0
    for value in values:
        if value >= ratio * last:
            labels.append(str(value))
            last = value
        else:
            labels.append("")
    return labels


@dataclass(frozen=True)
class _Whisker:
    """Hold what is drawn of a time, and how far its whiskers reach down and up."""

    middle: float
    below: float
    above: float


def _whisker(time: Time, means: bool) -> _Whisker:
    if means and time.mean is not None and time.se is not None:
        return _Whisker(time.mean, time.se, time.se)
    low = time.median
    high = time.median
    if time.q1 is not None and time.q3 is not None:
        low = time.q1
        high = time.q3
    return _Whisker(time.median, abs(time.median - low), abs(time.median - high))


def limit(found: Sequence[Measurement], baseline: str, kind: str) -> dict[str, float]:
    """Return by size the seconds of an entry's operations at the rate of the plain product.

    A graph's limit is by the product's own graph. If only the operations of the product's
    forward pass are known, its rate is that of the forward pass.
    """
    bounds = {}
    for one in found:
        # A baseline that has no graph has its operations all the same.
        work = one.flops(kind) or one.flops(kind.removesuffix("_graph"))
        if one.entry != baseline or not work:
            continue
        floor = product(found, one)
        if floor is not None:
            most = rate(floor, kind) or rate(floor, kind.replace("both", "forward"))
            if most:
                bounds[one.size] = work / most
    return bounds


def _styles(found: Sequence[Measurement], baseline: str) -> dict[str, dict[str, Any]]:
    """Choose how each entry is drawn.

    Ours are solid, the baseline thick. Peers are dashed with open marks, each package with its
    dashes, each entry with its color and mark. The floor is dotted.
    """
    timed = [one for one in found if one.status == "ok"]
    timed.sort(key=lambda one: one.entry != baseline)
    groups = {one.entry: one.group for one in timed}
    packages = {one.entry: one.package.split()[0] for one in found}
    peers = dict.fromkeys(packages[entry] for entry, group in groups.items() if group == "peer")
    dashes = dict(zip(peers, cycle(DASHES), strict=False))
    counts = dict.fromkeys(("ours", "peer", "floor"), 0)
    styles = {}
    for entry, group in groups.items():
        i = counts[group]
        counts[group] += 1
        if group == "ours":
            styles[entry] = _our_style(i)
        elif group == "peer":
            styles[entry] = _peer_style(i, dashes[packages[entry]])
        else:
            color = (INK, "#8a8a8a")[i % 2]
            styles[entry] = {"color": color, "linestyle": ":", "linewidth": 1.5}
    return styles


def _marker(i: int) -> dict[str, Any]:
    return {"marker": MARKERS[i % len(MARKERS)], "markersize": 5, "elinewidth": 0.8}


def _our_style(i: int) -> dict[str, Any]:
    width = 1.6
    if i == 0:
        width = 2.4
    return {**_marker(i), "color": OURS[i % len(OURS)], "linewidth": width, "zorder": 3}


def _peer_style(i: int, dashes: Any) -> dict[str, Any]:
    color = PEERS[i % len(PEERS)]
    style = {"color": color, "linestyle": dashes, "linewidth": 1.2, "markerfacecolor": "none"}
    return {**_marker(i), **style}


def _bars(panel: Panel, baseline: str, layout: Layout) -> Figure:
    found = [panel.at(size) for size in panel.sizes]
    entries = sum(len([one for one in at if one.ranked]) for at in found)
    height = 1.1 + 0.85 * len(found) + 0.26 * entries
    # The title of a pane stays clear of the axis above it.
    engine = ConstrainedLayoutEngine(h_pad=0.1)
    figure = Figure(figsize=(layout.width, height), layout=engine)
    panes = figure.subplots(len(found), 1, squeeze=False).flatten()
    for axes, size, at in zip(panes, panel.sizes, found, strict=True):
        _bars_of_a_size(axes, at, baseline)
        axes.set_title(_spelled_out(panel.form, size))
    unit = "forward + backward, ms"
    if are_steps(panel.found):
        unit = "a training step, ms"
    if any(one.ranked and one.entry == baseline for one in panel.found):
        unit += f"\n(2× is twice the time of {baseline})"
    columns = 5
    place = "center"
    if layout.stacked:
        columns = 2
        # A long label in the middle of a narrow axis would end beyond the figure.
        place = "right"
    panes[-1].set_xlabel(unit, loc=place)
    handles, labels = panes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    return figure


def _bars_of_a_size(axes: Axes, found: Sequence[Measurement], baseline: str) -> None:
    timed = [one for one in found if one.ranked]
    timed.sort(key=lambda one: -(one.ranked or 0))
    colors = {"ours": SKY, "peer": "0.65", "floor": "0.5"}
    reference = next((one.ranked for one in timed if one.entry == baseline), None)
    for i, one in enumerate(timed):
        color = colors[one.group]
        if one.entry == baseline:
            color = BLUE
        _bar(axes, i, one, color)
        if reference and one.entry != baseline:
            _annotate(axes, i, one, reference)
    axes.set_yticks(range(len(timed)), [one.entry for one in timed])
    if not are_steps(found):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.25)
    axes.grid(axis="x", alpha=0.3)
    shown = {
        "free weights": colors["floor"],
        baseline: BLUE,
        "other form of cwy": colors["ours"],
        "peer": colors["peer"],
    }
    for label, color in shown.items():
        axes.barh([0], [0], color=color, label=label)
    if not are_steps(found):
        axes.plot([], [], "D", color=ORANGE, markeredgecolor=INK, label="forward only")


def _bar(axes: Axes, place: int, one: Measurement, color: str) -> None:
    time = one.standing("both")
    if time is None:
        return
    whisker = _whisker(time, means=False)
    reach = [[whisker.below * 1e3], [whisker.above * 1e3]]
    axes.barh(place, whisker.middle * 1e3, xerr=reach, color=color, ecolor=INK, capsize=2)
    forward = one.seconds("forward")
    if forward and one.seconds("both"):
        at = forward * 1e3
        axes.plot(at, place, "D", color=ORANGE, markeredgecolor=INK, markersize=6, zorder=4)


def _annotate(axes: Axes, place: int, one: Measurement, reference: float) -> None:
    """Write a time as a multiple of the baseline's to the right of its bar."""
    time = one.standing("both")
    if time is None:
        return
    whisker = _whisker(time, means=False)
    end = ((whisker.middle + whisker.above) * 1e3, place)
    text = f"{times(whisker.middle / reference)}×"
    axes.annotate(text, end, xytext=(6, 0), textcoords="offset points", va="center")
