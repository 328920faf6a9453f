"""``cwy bench NAME``: what the options mean, and what is shown and written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..parametrizations import METHODS
from . import Bench, Size, figure, table
from .entry import Entry
from .load import idle_cores
from .peers import PEERS, choose, near
from .rows import Row, context, write_csv
from .run import run
from .sizes import parse_sizes
from .sizes import show as show_size
from .timing import FULL, QUICK, Effort

DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class Options:
    """The options of a benchmark, checked."""

    bench: Bench
    sizes: list[Size]
    wanted: Callable[[Entry], bool]
    device: torch.device
    dtype: torch.dtype
    effort: Effort
    threads: int | None
    seed: int
    entries: Callable[[Size], Sequence[Entry]]
    nonlinearities: tuple[str, ...] = ()

    def baseline(self, size: Size) -> str:
        """The entry that the others are compared with."""
        return ", ".join([_module(self.bench).baseline(size, self.device.type), *self.nonlinearities[:1]])


def options(
    bench: Bench,
    sizes: str | None,
    peers: str,
    methods: str,
    device: str,
    dtype: str,
    quick: bool,
    repeats: int | None,
    threads: int | None,
    seed: int,
    nonlinearity: str | None = None,
    only: str | None = None,
    graphs: bool = True,
) -> Options:
    """Options as the user wrote them; a mistake raises ValueError with what to do."""
    usual = bench.quick if quick else bench.gpu if bench.gpu and device.startswith("cuda") else bench.sizes
    chosen = parse_sizes(usual if sizes is None else sizes, bench.forms)
    packages, names = choose("--peers", peers, PEERS), choose("--methods", methods, list(METHODS))
    if dtype not in DTYPES:
        raise ValueError(f"--dtype: {dtype!r} is not known. {near(dtype, DTYPES)}")
    functions = _nonlinearities(bench, nonlinearity)
    effort = replace(QUICK if quick else FULL, graphs=graphs, counts=bench.counts)

    starts = tuple(part.strip() for part in (only or "").split(","))

    def wanted(entry: Entry) -> bool:
        if not entry.name.startswith(starts):
            return False
        if functions and entry.nonlinearity and entry.nonlinearity not in functions:
            return False
        ours = entry.group == "ours"
        return entry.group == "floor" or (entry.method in {*names, ""} if ours else entry.package in packages)

    if only:
        known = dict.fromkeys(entry.name.split(",")[0] for size in chosen for entry in _module(bench).entries(size))
        if not any(name.startswith(starts) for name in known):
            raise ValueError(f"--only: no entry begins with {only!r}. {near(only, list(known))}")
    return Options(
        bench,
        chosen,
        wanted,
        find_device(device),
        getattr(torch, dtype),
        effort if repeats is None else replace(effort, repeats=repeats),
        threads,
        seed,
        _module(bench).entries,
        functions,
    )


def measure(chosen: Options, console: Console) -> tuple[list[Row], bool]:
    """The rows, and whether it was stopped before the end; then they are those that were complete."""
    bench = chosen.bench
    console.print(f"{bench.about} Each entry is checked against float64, then all are timed in turn.")
    _set_threads(chosen, console)
    # float32 proper, which is torch's default for all but cuDNN.
    torch.backends.cudnn.allow_tf32 = False
    where = context(chosen.device, chosen.seed)
    rows: list[Row] = []
    # Seldom drawn by its own thread, which would run while samples are taken; not at all into a file.
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        refresh_per_second=1,
        disable=not console.is_terminal,
    )
    try:
        with bar:
            task = bar.add_task("", total=len(chosen.sizes))

            def watch(size: Size, what: str, part: float) -> None:
                done, text = chosen.sizes.index(size) + part, f"{show_size(size):>10}  {what:32}"
                bar.update(task, completed=done, description=text, refresh=text != bar.tasks[task].description)

            run(bench.name, chosen.entries, chosen.sizes, chosen.wanted, chosen.dtype, where, chosen.effort, rows, watch)
    except KeyboardInterrupt:
        return rows, True
    return rows, False


def write(chosen: Options, rows: list[Row], folder: Path) -> list[Path]:
    """Writes the rows as CSV and a picture of each form of size; returns the files."""
    bench = chosen.bench
    written = [folder / f"{bench.name}.csv"]
    write_csv(rows, written[0])
    for form, sizes, found in _by_form(chosen, rows):
        suffix = "" if form == bench.forms[0] else f"-{form}"
        written.append(folder / f"{bench.name}{suffix}.png")
        figure.draw(found, sizes, form, bench.about.rstrip("."), chosen.baseline(sizes[-1]), written[-1], bench.means)
    return written


def show(chosen: Options, rows: list[Row], written: list[Path], console: Console) -> None:
    """Shows the tables, what they say, what got no time, and where the files are."""
    bench = chosen.bench
    for form, sizes, found in _by_form(chosen, rows):
        also = [kind for kind in ("both_inline", "forward_graph", "both_graph") if any(getattr(row, kind) for row in found)]
        for kind in [*(["both"] if len(sizes) > 1 else []), *also]:
            console.print(table.overview(found, sizes, kind))
            console.print()
        last = [row for row in found if row.size == show_size(sizes[-1])]
        baseline = chosen.baseline(sizes[-1])
        console.print(table.detail(last, baseline, sizes[-1][-1] if form.endswith("T") else None))
        console.print(table.findings(last, baseline), end="\n\n")
        if paper := getattr(_module(bench), "paper", None):
            console.print(table.costs(last, paper(sizes[-1])), end="\n\n")
    if any(row.reason for row in rows):
        console.print(table.untimed(rows), end="\n\n")
    for path in written:
        console.print(f"{'The rows' if path.suffix == '.csv' else 'The picture'}: {path}", soft_wrap=True)
    console.print(figure.caption(rows[0]), style="dim")


def _by_form(chosen: Options, rows: list[Row]) -> Iterator[tuple[str, list[Size], list[Row]]]:
    """Sizes of one form, which share a table and a picture, and their rows; sizes at which nothing was timed are left out."""
    for form in chosen.bench.forms:
        sizes = [size for size in chosen.sizes if len(size) == form.count("x") + 1]
        sizes = [size for size in sizes if any(row.size == show_size(size) and row.status == "ok" for row in rows)]
        if sizes:
            yield form, sizes, [row for row in rows if row.size in map(show_size, sizes)]


def _set_threads(chosen: Options, console: Console) -> None:
    """As many threads as asked for; else torch's choice, but no more than there are idle cores."""
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)
        return
    usual, idle = torch.get_num_threads(), idle_cores() if chosen.device.type == "cpu" else None
    if idle is None or idle > usual - 0.5:
        return
    torch.set_num_threads(max(1, round(idle)))
    console.print(
        f"The CPU is busy, {idle:.1f} of {usual} cores idle: timed with {torch.get_num_threads()} (--threads to choose). "
        "Compare these times with each other only."
    )


def _module(bench: Bench) -> ModuleType:
    return import_module(f".{bench.name}", __package__)


def _nonlinearities(bench: Bench, text: str | None) -> tuple[str, ...]:
    """Those asked for, the first of which is compared with; none where a benchmark has none."""
    if not bench.nonlinearities:
        return ()
    from ..ops.recurrence.nonlinearities import NONLINEARITIES

    text = text or bench.nonlinearities
    chosen = choose("--nonlinearity", text, list(NONLINEARITIES))
    if not chosen:
        raise ValueError("--nonlinearity: none leaves nothing to time.")
    asked = [name.strip() for name in text.split(",")]
    return tuple(sorted(chosen, key=lambda name: asked.index(name) if name in asked else 0))


def find_device(name: str) -> torch.device:
    here = ["cpu", *(["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))] if torch.cuda.is_available() else [])]
    if name not in here:
        hint = near(name, here).replace("Known:", "Here:")
        raise ValueError(f"--device: {name!r} can't be used. {hint}")
    return torch.device(name)
