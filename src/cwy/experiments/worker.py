"""A process of a sweep, which trains one run after another.

It ends when the process of the sweep has ended, after saving its run.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from .engine import runner
from .engine.folder import CONFIG, DIVERGED, METRICS, RECORD, Folder
from .engine.monitor import Diverged
from .engine.signals import HANGUP, Stop, Stopped
from .engine.task import Settings, differences
from .sweeps import Place, Planned, read

STOPPED = "stopped, and saved"
"""How a run ends at its deadline, or by a signal."""
KEPT = (CONFIG, METRICS, RECORD, DIVERGED)
"""The files of a run that are kept. Its weights are large."""
PAUSE = 0.1
"""Seconds between two looks at whether the sweep is stopped."""

_stopping: Any = threading.Event()
"""Is set when the sweep is stopped. All processes share it."""
_leaving = threading.Event()
"""Is set when this process is to end."""
_training = threading.Lock()
"""Is held while a run is trained."""


def prepare(stopping: Any) -> None:
    """Prepare a process of the pool."""
    global _stopping
    _stopping = stopping
    torch.set_num_threads(1)
    # A terminal sends it to all processes, and the sweep tells this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, HANGUP):
        # Below nohup a closed terminal is ignored.
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _heard)
    threading.Thread(target=_end_with_sweep, daemon=True).start()


def _heard(number: int, frame: FrameType | None) -> None:
    threading.Thread(target=_leave, daemon=True).start()


def _end_with_sweep() -> None:
    """End this process when that of the sweep has ended."""
    sweep = multiprocessing.parent_process()
    if sweep is not None:
        sweep.join()
        _leave()


def _leave() -> None:
    """Let the run be saved, and end this process."""
    _leaving.set()
    with _training:
        os._exit(1)


class Deadline(Stop):
    """Ask a run to save its state and stop, as a signal does."""

    @contextmanager
    def until(self, moment: float) -> Generator[None]:
        """Ask at this moment, as :func:`time.time` counts, or when the sweep is stopped."""
        ended = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(moment, ended), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()

    @contextmanager
    def ending(self, leave: Callable[[], str]) -> Generator[None]:
        """Change nothing. The process stays for other runs, and this one stops after a step."""
        yield

    def _watch(self, moment: float, ended: threading.Event) -> None:
        while not ended.wait(PAUSE):
            if _is_stopped() or time.time() > moment:
                self.signal = signal.SIGTERM
                return


def _is_stopped() -> bool:
    return _stopping.is_set() or _leaving.is_set()


def _log(out: Path, run: Planned) -> Path:
    return out / f"{run.folder}.log"


def running_file(out: Path, run: Planned) -> Path:
    """Return a file that exists while the run is trained."""
    return out / f"{run.folder}.running"


def train_one(run: Planned, place: Place) -> str:
    """Train one run in this process, unless it has ended. Return how it ended, in words."""
    folder = place.out / run.folder
    request = runner.Sweep(
        run.what,
        methods=(run.method,),
        seeds=(run.seed,),
        assignments=run.settings,
        device=place.device,
        precision=place.precision,
        out=folder,
    )
    begun = folder.is_dir() and Folder(folder).last_checkpoint() is not None
    reason = _reason_against(run, place, request, begun)
    if reason is not None:
        return reason
    if not begun:
        # What a run that was killed left behind.
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
    running = running_file(place.out, run)
    with _training:
        running.touch()
        try:
            ended = _begin(request, folder, begun, _log(place.out, run), place.stop)
            if ended != STOPPED:
                _drop_weights(folder)
        finally:
            running.unlink()
            _free_memory()
    return ended


def _reason_against(run: Planned, place: Place, request: runner.Sweep, begun: bool) -> str | None:
    """Return why a run is not to be trained, in words, or None."""
    folder = place.out / run.folder
    record = read(place.out, run)
    there = None
    if record is not None:
        there = Settings.from_dict(record["config"])
    elif begun:
        there = Folder(folder).settings()
    if there is not None:
        (wanted,) = request.settings()
        differ = differences(there.to_dict(), wanted.to_dict())
        if differ:
            return f"failed: {folder} holds another run: {', '.join(differ)}. Choose another folder"
    if record is not None:
        return "was finished"
    if (folder / DIVERGED).is_file():
        return "diverged before"
    if time.time() > min(place.end, place.stop):
        return "not started, the time was over"
    if _is_stopped():
        return "not started, the sweep was stopped"
    return None


def _begin(request: runner.Sweep, folder: Path, begun: bool, log: Path, stop: float) -> str:
    """Train a run, or go on with one that has begun. Return how it ended, in words."""
    deadline = Deadline()
    try:
        with log.open("a", encoding="utf-8") as lines, deadline.until(stop):
            if begun:
                runner.resume(folder, request.device, Console(file=lines), deadline)
            else:
                runner.train(request, Console(file=lines), deadline)
    except Stopped:
        return STOPPED
    except Diverged as error:
        return f"diverged: {error}"
    except runner.RunError as error:
        return f"failed: {error}"
    return "finished"


def _drop_weights(folder: Path) -> None:
    """Remove what is large, and keep the settings, the log and the record."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in KEPT:
            path.unlink()


def _free_memory() -> None:
    """Give the memory of a run back, for the other processes."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
