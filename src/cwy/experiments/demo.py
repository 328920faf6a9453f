"""The demonstration: train CWY, a rival and an LSTM on Copying, in a minute on a CPU."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from .. import __version__
from ..registry import METHODS
from .copying.recipes import CopyingConfig
from .copying.report import baseline
from .copying.task import LENGTH, SYMBOLS
from .engine.display import Display
from .engine.distributed import Group
from .engine.folder import Folder
from .engine.loop import Loop
from .engine.signals import Stop
from .engine.task import Settings, settings
from .recurrent import BASELINES
from .report import Run, read_run, write
from .report.panels import arrange
from .report.words import duration

RECIPE = "copying/demo"


def prepare(methods: Sequence[str], iterations: int | None, seed: int) -> list[Settings]:
    """Return the settings of each run. Raise for an unknown method."""
    changes: tuple[str, ...] = ()
    if iterations is not None:
        changes = (f"iterations={iterations}",)
    return [settings(RECIPE, name, seed, changes) for name in methods]


def introduction(runs: Sequence[Settings]) -> str:
    """Describe the task and the settings, which all runs share."""
    config = cast(CopyingConfig, runs[0].config)
    return (
        f"A network is shown {LENGTH} symbols, each one of {SYMBOLS}, then {config.T} blanks. "
        "At a cue it must write the symbols down. "
        f"One that remembers nothing gets {1 / SYMBOLS:.1%} of them right. "
        f"Each network has {config.hidden_size} units and is trained on {config.iterations} "
        f"batches of {config.batch_size}, the same for all, by {config.optimizer} at learning "
        f"rate {config.lr:g}, orthogonal weights at {config.orthogonal_lr:g}."
    )


def race(runs: Sequence[Settings], console: Console, stop: Stop | None = None) -> list[Run]:
    """Train the networks one after another with live progress, and return their logs.

    The run folders are temporary. A signal raises :class:`~.engine.signals.Stopped`.
    """
    bars = Progress(
        TextColumn("{task.description:8}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        console=console,
    )
    with TemporaryDirectory(prefix="cwy-demo-") as place, bars, _one_thread():
        lanes = [_Lane(bars, one) for one in runs]
        folders = [Path(place) / one.name for one in runs]
        for one, folder, lane in zip(runs, folders, lanes, strict=True):
            Loop(one, Folder(folder), Group("cpu"), lane).run(stop)
        return [read_run(folder) for folder in folders]


class _Lane(Display):
    """Show a run's progress as one bar among the others."""

    def __init__(self, bars: Progress, one: Settings) -> None:
        super().__init__(None)
        steps = cast(CopyingConfig, one.config).iterations
        self.bars = bars
        self.bar = bars.add_task(one.method, total=steps, shown="")

    def show(self, step: int, split: str, metrics: dict[str, float]) -> None:
        shown = f"loss {metrics['loss']:.3f}, recalls {metrics['accuracy']:.0%}"
        self.bars.update(self.bar, completed=step, shown=shown)


def table(runs: Sequence[Run]) -> Table:
    """Tabulate the results on held-out data, one row per network, then a model without memory."""
    view = Table(box=SIMPLE_HEAD)
    view.add_column("network", no_wrap=True)
    view.add_column("its transition")
    for heading in ("parameters", "symbols\nrecalled", "loss", "training\ntime"):
        view.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        view.add_row(
            run.method,
            _kind(run.method),
            _size(run),
            f"{run.last('test', 'accuracy'):.1%}",
            f"{run.last('test', 'loss'):.4f}",
            duration(run.seconds),
            end_section=run is runs[-1],
        )
    view.add_row("no memory", "", "", f"{1 / SYMBOLS:.1%}", f"{baseline(runs[0].config):.4f}", "")
    return view


def _kind(method: str) -> str:
    if method == "rnn":
        return "free"
    if method in BASELINES:
        return "free, with gates"
    if METHODS[method].real:
        return "orthogonal"
    return "unitary"


def _size(run: Run) -> str:
    if not run.record:
        return ""
    return f"{run.record['parameters']:,}"


def picture(runs: Sequence[Run], out: Path) -> tuple[str, list[Path]]:
    """Write the report into a folder. Return its finding in one sentence, and the files."""
    panel = arrange(runs)[0]
    return f"{panel.title}, after {runs[0].steps} iterations: {panel.finding}.", write(runs, out)


def context(runs: Sequence[Run]) -> str:
    """Name the versions, device and seed of the numbers."""
    device = "cpu"
    if runs[0].record:
        device = runs[0].record["device"]
    versions = f"cwy {__version__}, torch {torch.__version__}"
    return f"{versions}, {device}, one thread, float32, seed {runs[0].seed}"


@contextmanager
def _one_thread() -> Generator[None]:
    # Threads gain nothing at this size, and on a busy machine each waits for the other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
