"""Run benchmarks: check the options, measure, then write and show what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .._hints import did_you_mean, sentences
from ..ops.recurrence.nonlinearities import NONLINEARITIES
from ..parametrizations import METHODS
from . import BENCHES, Bench, Size
from .harness.entry import Entry
from .harness.machine import idle_cores
from .harness.measure import Plan, run
from .harness.timing import FULL, QUICK, Effort
from .output import figures, pages, rows, tables
from .output.rows import Measurement
from .suites import INSTALL, PEERS, baseline, load, parse_sizes, show_size

DTYPES = ("float32", "float64", "bfloat16", "float16")
QUICK_SECONDS = 14.0
"""A benchmark's share of the two minutes that ``cwy bench all --quick`` promises."""


@dataclass(frozen=True)
class Request:
    """Hold the options of a benchmark as the user wrote them.

    Attributes:
        command: the command line, which rows carry.
    """

    sizes: str | None = None
    peers: str = "all"
    methods: str = "all"
    nonlinearity: str | None = None
    only: str | None = None
    skip: str | None = None
    device: str = "cpu"
    dtype: str = "float32"
    quick: bool = False
    repeats: int | None = None
    threads: int | None = None
    graphs: bool = True
    seed: int = 0
    command: str = ""


@dataclass(frozen=True)
class Options:
    """Hold the options of a benchmark, checked."""

    bench: Bench
    entries: Callable[[Size], Sequence[Entry]]
    sizes: list[Size]
    wanted: Callable[[Entry], bool]
    device: torch.device
    dtype: torch.dtype
    effort: Effort
    threads: int | None
    seed: int
    command: str
    nonlinearities: tuple[str, ...] = ()

    def baseline(self, size: Size) -> str:
        """Name the entry that the others are compared with."""
        return baseline(self.bench, size, self.device.type, self.nonlinearities)


def options(bench: Bench, request: Request) -> Options:
    """Check options. A mistake raises ValueError with what to do."""
    sizes = parse_sizes(_sizes(bench, request), bench.forms)
    entries = load(bench.name).entries
    packages = choose("--peers", request.peers, PEERS)
    methods = choose("--methods", request.methods, list(METHODS))
    nonlinearities = _nonlinearities(bench, request.nonlinearity)
    dtype = find_dtype(request.dtype)
    beginnings: tuple[str, ...] = ("",)
    if request.only:
        beginnings = _beginnings("--only", request.only, sizes, entries)
    skipped: tuple[str, ...] = ()
    if request.skip:
        skipped = _beginnings("--skip", request.skip, sizes, entries)

    def wanted(entry: Entry) -> bool:
        if not entry.name.startswith(beginnings) or entry.name.startswith(skipped):
            return False
        if nonlinearities and entry.nonlinearity not in ("", *nonlinearities):
            return False
        if entry.group == "ours":
            return entry.method in ("", *methods)
        return entry.group == "floor" or entry.package in packages

    return Options(
        bench=bench,
        entries=entries,
        sizes=sizes,
        wanted=wanted,
        device=find_device(request.device),
        dtype=dtype,
        effort=_effort(bench, request),
        threads=request.threads,
        seed=request.seed,
        command=request.command,
        nonlinearities=nonlinearities,
    )


def _sizes(bench: Bench, request: Request) -> str:
    if request.sizes is not None:
        return request.sizes
    if request.quick:
        return bench.quick
    if bench.gpu and request.device.startswith("cuda"):
        return bench.gpu
    return bench.sizes


def _effort(bench: Bench, request: Request) -> Effort:
    effort = FULL
    if request.quick:
        effort = QUICK
    effort = replace(effort, graphs=request.graphs, counts=bench.counts)
    if request.repeats is None:
        return effort
    return replace(effort, repeats=request.repeats)


def _beginnings(
    option: str,
    given: str,
    sizes: Sequence[Size],
    entries: Callable[[Size], Sequence[Entry]],
) -> tuple[str, ...]:
    """Read ``--only`` or ``--skip``: the beginnings of names, each of an entry."""
    beginnings = tuple(part.strip() for part in given.split(","))
    every = [entry for size in sizes for entry in entries(size)]
    known = dict.fromkeys(entry.name.split(",")[0] for entry in every)
    if not any(name.startswith(beginnings) for name in known):
        raise ValueError(f"{option}: no entry begins with {given!r}. {near(given, known)}")
    return beginnings


def _nonlinearities(bench: Bench, text: str | None) -> tuple[str, ...]:
    """Read ``--nonlinearity``. The first is compared with, and a benchmark may have none."""
    if not bench.nonlinearities:
        return ()
    text = text or bench.nonlinearities
    chosen = choose("--nonlinearity", text, list(NONLINEARITIES))
    if not chosen:
        raise ValueError("--nonlinearity: none leaves nothing to time.")
    asked = [name.strip() for name in text.split(",") if name.strip() in chosen]
    return tuple(dict.fromkeys(asked)) or tuple(chosen)


def find_device(name: str) -> torch.device:
    """Return a device that is here. Another raises ValueError."""
    here = ["cpu"]
    if torch.cuda.is_available():
        here += ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if name not in here:
        hint = near(name, here).replace("Known:", "Here:")
        raise ValueError(f"--device: {name!r} can't be used. {hint}")
    return torch.device(name)


def find_dtype(name: str) -> torch.dtype:
    """Return a dtype that benchmarks take. Another raises ValueError."""
    if name not in DTYPES:
        raise ValueError(f"--dtype: {name!r} is not known. {near(name, DTYPES)}")
    return getattr(torch, name)


def choose(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Return the names that an option selects: "all", "none", or some of those known.

    Example:
        >>> choose("--peers", "geoopt, torch", PEERS)
        ['torch', 'geoopt']
    """
    asked = {name.strip() for name in text.split(",") if name.strip()}
    if asked == {"all"}:
        return list(known)
    if asked == {"none"}:
        return []
    for name in sorted(asked - set(known)):
        raise ValueError(f"{option}: {name!r} is not known. {near(name, [*known, 'all', 'none'])}")
    if not asked:
        raise ValueError(f"{option} names nothing. Known: {', '.join(known)}, all, none.")
    return [name for name in known if name in asked]


def near(name: str, known: Collection[str]) -> str:
    """Return a hint: the known names most like this one, and all of them."""
    return sentences(did_you_mean(name, known, cutoff=0.6), f"Known: {', '.join(known)}.")


def measure(
    chosen: Options, console: Console, folder: Path | None = None
) -> tuple[list[Measurement], bool]:
    """Measure a benchmark.

    Args:
        chosen: the options.
        console: shows the progress.
        folder: where the rows are written after each size. A process that is killed then loses
            the rows of one size. None writes none.

    Returns:
        The measurements, and whether it was stopped before the end. Then they are those that were
        complete.
    """
    about = chosen.bench.about
    console.print(f"{about} Each entry is checked against float64, then all are timed in turn.")
    _set_threads(chosen, console)
    # Full float32, which is torch's default for all but cuDNN.
    torch.backends.cudnn.allow_tf32 = False
    plan = Plan(
        bench=chosen.bench.name,
        entries=chosen.entries,
        sizes=chosen.sizes,
        wanted=chosen.wanted,
        dtype=chosen.dtype,
        context=rows.context(chosen.device, chosen.seed, chosen.command),
        effort=chosen.effort,
    )
    found: list[Measurement] = []
    saved = 0
    bar = _progress(console)
    try:
        with bar:
            task = bar.add_task("", total=len(chosen.sizes))

            def watch(size: Size, what: str, part: float) -> None:
                nonlocal saved
                if folder is not None and len(found) > saved:
                    rows.write(found, _rows_file(chosen, folder))
                    saved = len(found)
                done = chosen.sizes.index(size) + part
                text = f"{show_size(size):>10}  {what:32}"
                changed = text != bar.tasks[task].description
                bar.update(task, completed=done, description=text, refresh=changed)

            run(plan, found, watch)
    except KeyboardInterrupt:
        return found, True
    return found, False


def _progress(console: Console) -> Progress:
    """Return a bar that its thread seldom draws: that would run while samples are taken."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        refresh_per_second=1,
        disable=not console.is_terminal,
    )


def _set_threads(chosen: Options, console: Console) -> None:
    """Use as many threads as asked for, else torch's choice but no more than idle cores."""
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)
        return
    if chosen.device.type != "cpu":
        return
    usual = torch.get_num_threads()
    idle = idle_cores()
    if idle > usual - 0.5:
        return
    threads = max(1, round(idle))
    torch.set_num_threads(threads)
    console.print(
        f"The CPU is busy, {idle:.1f} of {usual} cores idle: timed with {threads} "
        "(--threads to choose). Compare these times with each other only."
    )


def write(chosen: Options, found: list[Measurement], folder: Path) -> list[Path]:
    """Write the rows as CSV and a picture of each form of size, and return the files."""
    bench = chosen.bench
    written = [_rows_file(chosen, folder)]
    rows.write(found, written[0])
    for panel in rows.panels(bench, found):
        suffix = ""
        if panel.form != bench.forms[0]:
            suffix = f"-{panel.form}"
        path = folder / f"{bench.name}{suffix}.png"
        base = chosen.baseline(panel.sizes[-1])
        figures.draw(panel, bench.about.rstrip("."), base, path, bench.means)
        written.append(path)
    return written


def _rows_file(chosen: Options, folder: Path) -> Path:
    return folder / f"{chosen.bench.name}.csv"


def record(found: list[Measurement], folder: Path) -> list[Path]:
    """Write the rows as a record of a checkout, without pictures, and list it among the records."""
    path = folder / f"{found[0].bench}.csv"
    rows.write(found, path)
    results = folder.parent.parent
    pages.write_index(results)
    return [path, results / "README.md"]


def record_folder(place: str) -> Path:
    """Return the folder of the records of one machine, in the checkout that this is run in."""
    home = Path("results") / "bench"
    if not home.is_dir():
        raise ValueError(
            f"--record {place}: there is no folder {home} here. Run it in a checkout of cwy, or "
            "use --out."
        )
    if Path(place).name != place:
        raise ValueError(f"--record: {place!r} is not the name of a folder, as in 'h200'.")
    return home / place


def show(chosen: Options, found: list[Measurement], written: list[Path], console: Console) -> None:
    """Show the tables, what they show, what got no time, and where the files are."""
    for panel in rows.panels(chosen.bench, found):
        _show_panel(chosen, panel, console)
    untimed = tables.untimed(found)
    if untimed:
        console.print(untimed, end="\n\n")
    names = {".csv": "The rows", ".png": "The picture", ".md": "The list of records"}
    for path in written:
        console.print(f"{names[path.suffix]}: {path}", soft_wrap=True)
    console.print(rows.caption(found[0].context, found[0].dtype), style="dim")


def _show_panel(chosen: Options, panel: rows.Panel, console: Console) -> None:
    timed = {kind for one in panel.found for kind in one.times}
    kinds = [kind for kind in rows.KINDS if kind in timed and kind not in ("forward", "both")]
    if len(panel.sizes) > 1:
        kinds.insert(0, "both")
    for kind in kinds:
        console.print(tables.overview(panel.found, panel.sizes, kind))
        console.print()
    size = panel.sizes[-1]
    last = panel.at(size)
    base = chosen.baseline(size)
    steps = None
    if panel.form.endswith("T"):
        steps = size[-1]
    console.print(tables.detail(last, base, steps))
    console.print(tables.findings(last, base), end="\n\n")
    formulas = load(chosen.bench.name).formulas
    if formulas is not None:
        console.print(tables.costs(last, formulas(size)), end="\n\n")


def run_all(request: Request, folder: Path, console: Console) -> bool:
    """Measure and write every benchmark, then show the whole.

    Returns:
        Whether it was stopped before the end.
    """
    last: dict[str, tables.Last] = {}
    everything: list[Measurement] = []
    stopped = False
    for bench in BENCHES.values():
        chosen = options(bench, request)
        if request.quick:
            # The largest size takes as long as all the others.
            effort = replace(chosen.effort, total=QUICK_SECONDS)
            chosen = replace(chosen, sizes=chosen.sizes[:-1] or chosen.sizes, effort=effort)
        found, stopped = measure(chosen, console)
        # The choices of the first benchmark hold for the others.
        request = replace(request, threads=torch.get_num_threads())
        everything += found
        if found:
            write(chosen, found, folder)
            shown = _largest(chosen, found)
            if shown is not None:
                last[bench.name] = shown
        if stopped:
            break
    if last:
        _show_all(last, folder, console)
    _show_without(everything, console)
    if stopped:
        console.print("Stopped: only what was complete is written.")
    return stopped


def _largest(chosen: Options, found: Sequence[Measurement]) -> tables.Last | None:
    """Return what was measured at the largest size at which a whole pass or step has a time."""
    kind = "both"
    if tables.are_steps(found):
        kind = "forward"
    timed = {one.size for one in found if one.seconds(kind)}
    sizes = [size for size in chosen.sizes if show_size(size) in timed]
    if not sizes:
        return None
    size = sizes[-1]
    there = [one for one in found if one.size == show_size(size)]
    return tables.Last(chosen.baseline(size), there)


def _show_all(last: dict[str, tables.Last], folder: Path, console: Console) -> None:
    console.print(tables.of_all(last), end="\n\n")
    path = folder / "all.png"
    figures.draw_all(last, path)
    console.print(f"The rows and pictures of each: {folder}", soft_wrap=True)
    console.print(f"The picture: {path}", soft_wrap=True)
    first = next(iter(last.values())).found[0]
    console.print(rows.caption(first.context, first.dtype), style="dim")


def _show_without(everything: Sequence[Measurement], console: Console) -> None:
    """Show how many entries have no time, and why most often."""
    without = [one.reason for one in everything if one.status not in ("ok", "missing")]
    if without:
        reasons = Counter(without).most_common(2)
        most = ", ".join(f"{reason} ({count})" for reason, count in reasons)
        console.print(
            f"{len(without)} of {len(everything)} have no time, and their rows state why. "
            f"The most frequent reasons: {most}."
        )
    missing = {one.package for one in everything if one.status == "missing"}
    if missing:
        names = ", ".join(sorted(missing))
        console.print(f"Not installed, so not timed: {names}. {INSTALL}")
