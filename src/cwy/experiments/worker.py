"""A process of a sweep, which trains one run after another.

It ends when the process of the sweep has ended, after saving its run.
"""

from __future__ import annotations

import gc
import multiprocessing
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console

from .engine import runner
from .engine.folder import CONFIG, DIVERGED, METRICS, RECORD, Claimed, Folder
from .engine.monitor import Diverged
from .engine.signals import HANGUP, Stop, Stopped
from .engine.task import Settings, differences
from .sweeps import Place, Planned, read, wanted

STOPPED = "stopped, and saved"
"""How a run ends at its deadline, or by a signal."""
LEFT = "left to another process, which trains it"
"""How a run ends here that another sweep has begun."""
KEPT = (CONFIG, METRICS, RECORD, DIVERGED)
"""The files of a run that are kept. Its weights are large."""
PAUSE = 0.1
"""Seconds between two looks at whether a run or a sweep is to stop."""
HEARD = [number for number in (signal.SIGINT, signal.SIGTERM, HANGUP) if number is not None]
"""The signals that stop a sweep."""

_leaving = threading.Event()
"""Is set when this process is to save its run and end."""
_trains = threading.Event()
"""Is set while this process trains a run, and until it has answered."""


def serve(connection: Connection) -> None:
    """Train the runs that come, and answer how each ended. End when the sweep has ended."""
    torch.set_num_threads(1)
    # A terminal sends it to all processes, and the sweep sends SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in HEARD:
        # Below nohup a closed terminal is ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
    threading.Thread(target=_leave_after_sweep, daemon=True).start()
    # The sweep closes its end, or is gone.
    with suppress(EOFError, OSError):
        while not _leaving.is_set():
            run, place = connection.recv()
            _trains.set()
            connection.send(_answer(run, place))
            _trains.clear()


def _leave(number: int, frame: FrameType | None) -> None:
    _leaving.set()
    if not _trains.is_set():
        sys.exit()


def _leave_after_sweep() -> None:
    """Save the run and end when the process of the sweep has ended."""
    sweep = multiprocessing.parent_process()
    if sweep is not None:
        sweep.join()
        _leaving.set()


def _answer(run: Planned, place: Place) -> str:
    """Train a run, and return how it ended."""
    try:
        return train_one(run, place)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        return f"failed: {type(error).__name__}: {reason}"
    finally:
        _free_memory()


class Deadline(Stop):
    """Ask a run to save its state and stop, as a signal does."""

    @contextmanager
    def until(self, moment: float) -> Generator[None]:
        """Ask at this moment, as :func:`time.time` counts, or when this process is to end."""
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
            if _leaving.is_set() or time.time() > moment:
                self.signal = signal.SIGTERM
                return


def _log(out: Path, run: Planned) -> Path:
    return out / f"{run.folder}.log"


def train_one(run: Planned, place: Place) -> str:
    """Train one run in this process, unless it has ended. Return how it ended, in words."""
    folder = Folder(place.out / run.folder)
    request = runner.Sweep(
        run.what,
        methods=(run.method,),
        seeds=(run.seed,),
        assignments=run.settings,
        device=place.device,
        precision=place.precision,
        out=folder.path,
    )
    reason = _reason_against(run, place)
    if reason is not None:
        return reason
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    ended = _begin(request, folder, _log(place.out, run), place.stop)
    if folder.diverged or read(place.out, run) is not None:
        _drop_weights(folder.path)
    return ended


def _reason_against(run: Planned, place: Place) -> str | None:
    """Return why a run is not to be trained, in words, or None."""
    folder = Folder(place.out / run.folder)
    record = read(place.out, run)
    there = None
    if folder.exists:
        there = folder.settings()
    elif record is not None:
        there = Settings.from_dict(record["config"])
    if there is not None:
        differ = differences(there.to_dict(), wanted(run, place).to_dict())
        if differ:
            return (
                f"failed: {folder.path} holds another run: {', '.join(differ)}. "
                "Choose another folder"
            )
    if record is not None:
        return "was finished"
    if folder.diverged:
        return "diverged before"
    if time.time() > min(place.end, place.stop):
        return "not started, the time was over"
    return None


def _begin(request: runner.Sweep, folder: Folder, log: Path, stop: float) -> str:
    """Train a run, or go on with one that has begun. Return how it ended, in words."""
    deadline = Deadline()
    try:
        with log.open("a", encoding="utf-8") as lines, deadline.until(stop):
            if folder.exists:
                runner.resume(folder.path, request.device, Console(file=lines), deadline)
            else:
                runner.train(request, Console(file=lines), deadline)
    except Stopped:
        return STOPPED
    except Diverged as error:
        return f"diverged: {error}"
    except runner.RunError as error:
        if isinstance(error.__cause__, Claimed):
            return LEFT
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
