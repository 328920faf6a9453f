"""``cwy bench all``: every benchmark, and at the end one table and one picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from ..terminal import whole
from . import BENCHES
from .command import measure, options, write
from .entry import Group
from .figure import BLUE, ORANGE, SKY, caption
from .peers import INSTALL
from .rows import Row
from .sizes import show
from .table import blank, ms, rivals, seconds, times

QUICK_SECONDS = 14.0
"""A benchmark's share of the two minutes that ``--quick`` promises; what is begun within it is finished."""

Last = Mapping[str, tuple[str, list[Row]]]
"""By benchmark: the entry that others are compared with, and the rows of its last size."""


def run_all(quick: bool, device: str, threads: int | None, graphs: bool, seed: int, folder: Path, console: Console) -> bool:
    """Measures and writes every benchmark, then shows the whole; returns whether it was stopped before the end."""
    last: dict[str, tuple[str, list[Row]]] = {}
    everything: list[Row] = []
    stopped = False
    for bench in BENCHES.values():
        chosen = options(bench, None, "all", "all", device, "float32", quick, None, threads, seed, graphs=graphs)
        if quick:
            # The largest size takes as long as all the others.
            effort = replace(chosen.effort, total=QUICK_SECONDS)
            chosen = replace(chosen, sizes=chosen.sizes[:-1] or chosen.sizes, effort=effort)
        rows, stopped = measure(chosen, console)
        threads = torch.get_num_threads()
        everything += rows
        if rows:
            write(chosen, rows, folder)
            timed = [size for size in chosen.sizes if any(row.size == show(size) and row.both for row in rows)]
            if timed:
                found = [row for row in rows if row.size == show(timed[-1])]
                last[bench.name] = chosen.baseline(timed[-1]), found
        if stopped:
            break
    if last:
        console.print(overview(last), end="\n\n")
        draw(last, folder / "all.png")
        console.print(f"The rows and pictures of each: {folder}\nThe picture: {folder / 'all.png'}", soft_wrap=True)
        console.print(caption(next(iter(last.values()))[1][0]), style="dim")
    without = Counter(row.reason for row in everything if row.status not in ("ok", "missing"))
    if without:
        most = ", ".join(f"{reason} ({count})" for reason, count in without.most_common(2))
        console.print(f"{without.total()} of {len(everything)} have no time, and their rows say why; most often: {most}.")
    if missing := {row.package for row in everything if row.status == "missing"}:
        console.print(f"Not installed, so not timed: {', '.join(sorted(missing))}. {INSTALL}")
    if stopped:
        console.print("Stopped: only what was complete is written.")
    return stopped


def overview(last: Last) -> Table:
    """A row a benchmark: what ours takes at its last size, and the fastest and the slowest rival beside it."""
    view = blank("Forward + backward, at the largest size timed", "benchmark", "ours", "fastest rival", "slowest rival")
    for name, (baseline, rows) in last.items():
        base = next((seconds(row) for row in rows if row.entry == baseline), None)
        cells = [f"{baseline}\n{'–' if base is None else f'{ms(base)} ms'}"]
        if base is not None:
            found = sorted(((seconds(row) or 0.0) / base, row.entry) for row in rivals(rows, baseline))
            cells += [f"{rival}\n{times(ratio)}×" for ratio, rival in (*found[:1], *found[-1:])] or ["–", "–"]
        view.add_row(f"{name}\n{rows[0].size}", *cells)
    return view


def ratios(baseline: str, rows: list[Row]) -> list[tuple[Group, float]]:
    """Of each entry its group, and its time as a multiple of ours; peers are those of the table."""
    base = next((seconds(row) for row in rows if row.entry == baseline), None)
    peers = rivals(rows, baseline)
    shown = [row for row in rows if row.group != "peer" or row in peers]
    return [(row.group, time / base) for row in shown if base and (time := seconds(row))]


def draw(last: Last, path: Path) -> None:
    """A line a benchmark: entries by their time as a multiple of ours. The file appears whole or not at all."""
    figure = Figure(figsize=(10, 1.6 + 0.75 * len(last)), layout="constrained")
    axes = figure.subplots()
    groups = {
        "ours": (SKY, "other methods of cwy", "o"),
        "peer": ("0.75", "peers", "s"),
        "floor": (ORANGE, "free weights", "D"),
    }
    for place, (baseline, rows) in enumerate(last.values()):
        for group, (colour, _, marker) in groups.items():
            at = [ratio for one, ratio in ratios(baseline, rows) if one == group]
            axes.plot(at, [place] * len(at), marker, color=colour, markeredgecolor="0.2", markersize=8, alpha=0.9)
        axes.plot([1], [place], "o", color=BLUE, markeredgecolor="0.2", markersize=9, zorder=4)
    for colour, label, marker in (*groups.values(), (BLUE, "ours", "o")):
        axes.plot([], [], marker, color=colour, markeredgecolor="0.2", label=label)
    axes.axvline(1, color="0.5", linewidth=0.8, zorder=0)
    names = [f"{name}: {baseline}\nat {rows[0].size}" for name, (baseline, rows) in last.items()]
    axes.set_yticks(range(len(last)), names)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="forward + backward, as a multiple of ours (left is faster)")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    figure.supxlabel(caption(next(iter(last.values()))[1][0]), fontsize="small", color="0.4")
    with whole(path) as partial:
        figure.savefig(partial, format="png", dpi=150)
