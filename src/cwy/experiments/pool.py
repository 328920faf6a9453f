"""Train the runs of a sweep, several at a time, in processes that stay for the next run.

A signal stops a sweep. Runs that have begun are saved, and the next sweep goes on with them. If the
sweep itself is killed, its processes save their runs and end.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from .engine.signals import Stop, status
from .sweeps import Place, Planned
from .worker import PAUSE, prepare, running_file, train_one

ATTEMPTS = 2
"""How often a run is begun if its process dies."""


class SweepStopped(Exception):
    """Report that a signal stopped the sweep. The runs that had begun are saved."""

    def __init__(self, number: int) -> None:
        super().__init__("stopped. The same command goes on with the runs that are not finished.")
        self.status = status(number)


def train(runs: Sequence[Planned], place: Place, processes: int) -> Iterator[str]:
    """Train runs, several at a time. Yield a line about each when it ends.

    A run that diverges or fails does not stop the others. A run that finished or diverged before
    is not trained again, and one whose folder holds other settings fails. If a process dies, the
    runs that it leaves are tried once more. A signal raises :class:`SweepStopped` when all that
    had begun are saved.
    """
    begin = time.time()
    for run in runs:
        # A sweep that was killed may have left them.
        running_file(place.out, run).unlink(missing_ok=True)
    attempts: Counter[Planned] = Counter()
    left = list(runs)
    # A forked process cannot use CUDA.
    context = multiprocessing.get_context("spawn")
    stopping = context.Event()
    with Stop() as stop:
        while left:
            died = []
            with ProcessPoolExecutor(processes, context, prepare, (stopping,)) as pool:
                waiting = {pool.submit(train_one, run, place): run for run in left}
                for done in _ended(waiting, stop, stopping):
                    run = waiting[done]
                    if isinstance(done.exception(), BrokenProcessPool):
                        died.append(run)
                    else:
                        yield f"{time.time() - begin:6.0f} s  {run.folder}: {_status(done)}"
            if stop.signal:
                raise SweepStopped(stop.signal)
            left = []
            # A process that dies takes the whole pool with it. Most of these runs had not begun.
            for run in died:
                if running_file(place.out, run).exists():
                    running_file(place.out, run).unlink()
                    attempts[run] += 1
            for run in died:
                if attempts[run] < ATTEMPTS and any(attempts[one] for one in died):
                    left.append(run)
                else:
                    yield f"{time.time() - begin:6.0f} s  {run.folder}: failed: its process died"


def _ended(waiting: Iterable[Future[str]], stop: Stop, stopping: Any) -> Iterator[Future[str]]:
    """Yield what ends. When a signal has come, cancel what has not begun, and stop the rest."""
    left = set(waiting)
    while left:
        done, left = wait(left, timeout=PAUSE, return_when=FIRST_COMPLETED)
        yield from done
        if stop.signal and not stopping.is_set():
            stopping.set()
            left = {one for one in left if not one.cancel()}


def _status(done: Future[str]) -> str:
    """Return how a run ended."""
    error = done.exception()
    if error is None:
        return done.result()
    reason = str(error).strip().partition("\n")[0]
    return f"failed: {type(error).__name__}: {reason}"
