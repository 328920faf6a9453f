"""The results as a picture: lines over N where there are several sizes, bars where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from ..terminal import whole
from .rows import Row
from .sizes import Size, show
from .table import KINDS, field, product, rate, seconds, times

# Colours that colour-blind readers can tell apart: one of Okabe and Ito's for the first of ours, then Tol's "muted".
BLUE, SKY, ORANGE = "#0072B2", "#88CCEE", "#E69F00"
OURS = (BLUE, SKY, "#CC6677", "#44AA99", "#882255", "#999933", "#AA4499", "#117733", "#DDCC77", "#332288")
MARKERS = "osD^vP*X<>hdp"
LIMIT = {"color": "#0072B2", "linestyle": (0, (1, 3)), "linewidth": 1.5}
DASHES = ((0, (5, 2)), (0, (6, 2, 1, 2)), (0, (2, 2)), (0, (9, 2)))


def draw(
    rows: Sequence[Row], sizes: Sequence[Size], form: str, title: str, baseline: str, path: Path, means: bool = False
) -> None:
    """Draws rows of sizes of one form, e.g. "NxM", into a PNG that appears whole or not at all.

    With ``means`` the lines are means with their standard errors, else medians with quartiles.
    """
    figure = _lines(rows, sizes, form, baseline, means) if len(sizes) > 1 else _bars(rows, baseline)
    if len(sizes) > 1:
        figure.suptitle(title)
    else:
        # Below the legend, which an outer title would cover.
        figure.axes[0].set_title(f"{title}\n{_named(form, sizes[0])}")
    listed = "" if _along(sizes, form)[1] else f"{form}: {', '.join(map(show, sizes))}\n"
    figure.supxlabel(listed + caption(rows[0]), fontsize="small", color="0.4")
    with whole(path) as partial:
        figure.savefig(partial, format="png", dpi=150)


def caption(row: Row) -> str:
    """What the numbers belong to."""
    threads = f", {row.threads} thread{'s' * (row.threads > 1)}" if row.device == "cpu" else ""
    commit = f" ({row.commit})" if row.commit else ""
    return (
        f"{row.device_name}{threads}; cwy {row.cwy}{commit}, torch {row.torch}, {row.dtype}, seed {row.seed}, {row.date[:10]}"
    )


def _named(form: str, size: Size, skip: int = 0) -> str:
    return ", ".join(f"{letter} = {value}" for letter, value in [*zip(form.split("x"), size, strict=True)][skip:])


def _along(sizes: Sequence[Size], form: str) -> tuple[int | None, str]:
    """The place of the letter that lines run along, N if they can, and the axis' name, empty if other letters vary too."""
    letters = form.split("x")
    for i, letter in enumerate(letters):
        if len({size[i] for size in sizes}) == len(sizes):
            others = [(a, {size[j] for size in sizes}) for j, a in enumerate(letters) if j != i]
            if all(len(values) == 1 for _, values in others):
                fixed = ", ".join(f"{a} = {values.pop()}" for a, values in others)
                return i, f"{letter} ({fixed})" if fixed else letter
    return (0 if len({size[0] for size in sizes}) == len(sizes) else None), ""


def _lines(rows: Sequence[Row], sizes: Sequence[Size], form: str, baseline: str, means: bool) -> Figure:
    kinds = ["forward", "both", *(["both_graph"] if any(row.both_graph for row in rows) else [])]
    figure = Figure(figsize=(4 + 4 * len(kinds), 6.5), layout="constrained")
    panels = figure.subplots(1, len(kinds), sharey=True)
    names = [show(size) for size in sizes]
    # Of a recurrence the time of a step is drawn.
    steps = {show(size): size[-1] if form.endswith("T") else 1 for size in sizes}
    unit = {name: (1e6 if form.endswith("T") else 1e3) / count for name, count in steps.items()}
    along, label = _along(sizes, form)
    at = dict(zip(names, range(len(sizes)) if along is None else [size[along] for size in sizes], strict=True))
    styles = _styles(rows, baseline)
    for axes, kind in zip(panels, kinds, strict=True):
        for entry, style in styles.items():
            timed = [row for row in rows if row.entry == entry and getattr(row, field(row, kind)) is not None]
            timed.sort(key=lambda row: at[row.size])
            middle, below, above = (
                [x * unit[row.size] for row, x in zip(timed, xs, strict=True)] for xs in _spread(timed, kind, means)
            )
            axes.errorbar([at[row.size] for row in timed], middle, yerr=[below, above], label=entry, **style)
        bound = {size: seconds * unit[size] for size, seconds in limit(rows, baseline, kind).items()}
        if bound:
            axes.plot([at[size] for size in bound], bound.values(), label=f"{baseline} at the product's rate", **LIMIT)
        axes.set(title=KINDS[kind], yscale="log", xlabel=form if along is None else label or form[0])
        axes.set_xscale("linear" if along is None else "log")
        axes.set_xticks(list(at.values()), names if along is None else _apart(list(at.values())))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(which="major", alpha=0.3)
    timed = "a step, µs" if form.endswith("T") else "a call, ms"
    panels[0].set_ylabel(f"time {timed} ({'mean and standard error' if means else 'median and quartiles'})")
    panels[0].yaxis.set_major_formatter("{x:g}")
    handles = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    last = {row.entry: row.both or row.forward or 0 for row in rows if row.size == names[-1]}
    slowest_first = sorted(handles, key=lambda entry: -last.get(entry, 0))
    figure.legend(
        [handles[e] for e in slowest_first], slowest_first, loc="outside right center", frameon=False, fontsize="small"
    )
    return figure


def _apart(values: Sequence[int]) -> list[str]:
    """Labels of ticks; on a logarithmic axis one that would touch the label before it is left out."""
    labels, last = [], 0.0
    for value in values:
        far = value >= 1.25 * last
        labels.append(str(value) if far else "")
        last = value if far else last
    return labels


def _spread(timed: Sequence[Row], kind: str, means: bool) -> tuple[list[float], list[float], list[float]]:
    """What is drawn of each row, and how far its whiskers reach down and up."""
    fields = [(row, field(row, kind)) for row in timed]
    if means:
        errors = [getattr(row, f"{name}_se") for row, name in fields]
        return [getattr(row, f"{name}_mean") for row, name in fields], errors, errors
    middle, low, high = ([getattr(row, f"{name}{end}") for row, name in fields] for end in ("", "_q1", "_q3"))
    below, above = ([abs(x - y) for x, y in zip(middle, ends, strict=True)] for ends in (low, high))
    return middle, below, above


def limit(rows: Sequence[Row], baseline: str, kind: str) -> dict[str, float]:
    """Seconds that the operations of an entry would take at the rate of the plain product of its size, by size.

    A graph's limit is by the product's own graph. Where only the operations of its forward pass are known, that is its rate.
    """
    work, found = f"{kind.removesuffix('_graph')}_flops", {}
    for row in rows:
        floor = product(rows, row) if row.entry == baseline and getattr(row, work) else None
        if floor and (most := rate(floor, kind) or rate(floor, kind.replace("both", "forward"))):
            found[row.size] = getattr(row, work) / most
    return found


def _styles(rows: Sequence[Row], baseline: str) -> dict[str, dict[str, Any]]:
    """Ours in colour and solid, the baseline thick; peers grey, thin, each package with its dashes; the floor dotted."""
    groups = {row.entry: row.group for row in sorted(rows, key=lambda row: row.entry != baseline) if row.status == "ok"}
    packages = {row.entry: row.package.split()[0] for row in rows}
    dashes = dict(
        zip(dict.fromkeys(packages[e] for e, group in groups.items() if group == "peer"), cycle(DASHES), strict=False)
    )
    counts = dict.fromkeys(("ours", "peer", "floor"), 0)
    styles: dict[str, dict[str, Any]] = {}
    for entry, group in groups.items():
        i = counts[group]
        counts[group] += 1
        marker = {"marker": MARKERS[i % len(MARKERS)], "markersize": 5, "elinewidth": 0.8}
        if group == "ours":
            styles[entry] = {**marker, "color": OURS[i % len(OURS)], "linewidth": 2.4 if i == 0 else 1.6, "zorder": 3}
        elif group == "peer":
            shade = str(0.25 + 0.4 * (i % 5) / 4)
            styles[entry] = {
                **marker,
                "color": shade,
                "linestyle": dashes[packages[entry]],
                "linewidth": 0.9,
                "markerfacecolor": "white",
            }
        else:
            styles[entry] = {"color": ("black", "0.5")[i % 2], "linestyle": ":", "linewidth": 1.5}
    return styles


def _bars(rows: Sequence[Row], baseline: str) -> Figure:
    timed = sorted((row for row in rows if seconds(row)), key=lambda row: -(seconds(row) or 0))
    figure = Figure(figsize=(10, 1.8 + 0.34 * len(timed)), layout="constrained")
    axes = figure.subplots()
    colours = {"ours": SKY, "peer": "0.8", "floor": "0.4"}
    reference = next((row.both for row in timed if row.entry == baseline), None)
    for i, (row, middle, below, above) in enumerate(zip(timed, *_spread(timed, "both", False), strict=True)):
        colour = BLUE if row.entry == baseline else colours[row.group]
        axes.barh(i, middle * 1e3, xerr=[[below * 1e3], [above * 1e3]], color=colour, ecolor="0.2", capsize=2)
        if reference and row.entry != baseline:
            ratio, end = f"{times(middle / reference)}×", ((middle + above) * 1e3, i)
            axes.annotate(ratio, end, xytext=(6, 0), textcoords="offset points", va="center")
        axes.plot((row.forward or 0) * 1e3, i, "D", color=ORANGE, markeredgecolor="black", markersize=6, zorder=4)
    axes.set_yticks(range(len(timed)), [row.entry for row in timed])
    axes.set(xscale="log", xlabel="forward + backward, ms (median; whiskers: quartiles)")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.2)
    axes.grid(axis="x", alpha=0.3)
    shown = {"plain product": colours["floor"], baseline: BLUE, "other method of cwy": colours["ours"], "peer": colours["peer"]}
    for label, colour in shown.items():
        axes.barh([0], [0], color=colour, label=label)
    axes.plot([], [], "D", color=ORANGE, markeredgecolor="black", label="forward alone")
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize="small")
    return figure
