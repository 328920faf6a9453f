"""The demonstration: the Copying task, small enough for a minute on a CPU. CWY, a rival and an LSTM, side by side."""

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
from .engine.loop import Loop
from .engine.run import Folder
from .engine.signals import Stop
from .engine.task import Settings, settings
from .recurrent import BASELINES
from .report import Run, read_run, write
from .report.panels import arrange
from .report.words import duration

RECIPE = "copying/demo"


def prepare(methods: Sequence[str], iterations: int | None, seed: int) -> list[Settings]:
    """The settings of each run; a mistake raises."""
    changes = () if iterations is None else (f"iterations={iterations}",)
    return [settings(RECIPE, name, seed, changes) for name in methods]


def introduction(runs: Sequence[Settings]) -> str:
    """What is about to be done, with the settings, which are the same for all."""
    c = cast(CopyingConfig, runs[0].config)
    return (
        f"A network is shown {LENGTH} symbols, each one of {SYMBOLS}, then {c.T} blanks; at a cue it must write the symbols "
        f"down. One that remembers nothing gets {1 / SYMBOLS:.1%} of them right. Each network has {c.hidden_size} units and is "
        f"trained on {c.iterations} batches of {c.batch_size}, the same for all, by {c.optimizer} at rate {c.lr:g}, orthogonal "
        f"weights at {c.orthogonal_lr:g}."
    )


def race(runs: Sequence[Settings], console: Console, stop: Stop | None = None) -> list[Run]:
    """Trains the networks one after another with live progress; what was logged of each. Nothing is left on the disk.

    A signal raises :class:`~.engine.signals.Stopped`.
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
    """A run's bar among the others'."""

    def __init__(self, bars: Progress, one: Settings) -> None:
        super().__init__(None)
        self.bars, self.bar = (
            bars,
            bars.add_task(one.method, total=cast(CopyingConfig, one.config).iterations, shown=""),
        )

    def show(self, step: int, split: str, metrics: dict[str, float]) -> None:
        shown = f"loss {metrics['loss']:.3f}, recalls {metrics['accuracy']:.0%}"
        self.bars.update(self.bar, completed=step, shown=shown)


def table(runs: Sequence[Run]) -> Table:
    """The results on data that no network has seen, a row a network; last, what needs no memory."""
    view = Table(box=SIMPLE_HEAD)
    view.add_column("network", no_wrap=True)
    view.add_column("its transition")
    for heading in ("parameters", "symbols\nrecalled", "loss", "training\ntime"):
        view.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        loss, recalled = run.last("test", "loss"), run.last("test", "accuracy")
        size = f"{run.record['parameters']:,}" if run.record else ""
        cells = size, f"{recalled:.1%}", f"{loss:.4f}", duration(run.seconds)
        view.add_row(run.method, _kind(run.method), *cells, end_section=run is runs[-1])
    view.add_row("no memory", "", "", f"{1 / SYMBOLS:.1%}", f"{baseline(runs[0].config):.4f}", "")
    return view


def _kind(method: str) -> str:
    if method in BASELINES:
        return "free" if method == "rnn" else "free, with gates"
    return "orthogonal" if METHODS[method].real else "unitary"


def picture(runs: Sequence[Run], out: Path) -> tuple[str, list[Path]]:
    """Writes the report into a folder; one sentence on what was seen, and the files."""
    panel = arrange(runs)[0]
    return f"{panel.title}, after {runs[0].steps} iterations: {panel.finding}.", write(runs, out)


def context(runs: Sequence[Run]) -> str:
    """What the numbers belong to."""
    device = runs[0].record["device"] if runs[0].record else "cpu"
    return f"cwy {__version__}, torch {torch.__version__}, {device}, one thread, float32, seed {runs[0].seed}"


@contextmanager
def _one_thread() -> Generator[None]:
    # At this size threads gain nothing, and on a busy machine each waits for the other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
