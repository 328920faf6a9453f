"""Train the runs of a sweep, several at a time, in processes that stay for the next run.

A signal stops a sweep. Runs that have begun are saved, and the next sweep goes on with them. If the
sweep itself is killed, its processes save their runs and end.

Each process has a pipe of its own. With an executor of ``concurrent.futures`` one process that dies
takes all others with it.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Self

from .engine.signals import Stop, status
from .sweeps import Place, Planned
from .worker import HEARD, PAUSE, STOPPED, serve

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
    is not trained again, and one whose folder holds other settings fails. If a process dies, its
    run is tried once more. A signal raises :class:`SweepStopped` when all that had begun are
    saved.
    """
    begin = time.time()
    waiting = deque(runs)
    deaths: Counter[Planned] = Counter()
    with Stop() as stop, _Pool(processes) as pool:
        while waiting or pool.is_busy:
            if stop.signal:
                waiting.clear()
                pool.stop()
            while waiting and pool.is_free:
                pool.begin(waiting.popleft(), place)
            for run, ended in pool.ended():
                if ended is None:
                    deaths[run] += 1
                    if deaths[run] < ATTEMPTS:
                        waiting.append(run)
                        continue
                    ended = "failed: its process died"
                if ended == STOPPED and not stop.signal and time.time() < place.stop:
                    # Somebody stopped only its process.
                    waiting.append(run)
                    continue
                yield f"{time.time() - begin:6.0f} s  {run.folder}: {ended}"
        if stop.signal:
            raise SweepStopped(stop.signal)


def print_all(runs: Sequence[Planned], place: Place, processes: int) -> int:
    """Train runs, and print a line about each. Return how many failed."""
    failures = 0
    for line in train(runs, place, processes):
        print(line, flush=True)
        if ": failed" in line:
            failures += 1
    return failures


@dataclass
class _Worker:
    """Hold a process, the way to it, and the run that it trains."""

    process: SpawnProcess
    connection: Connection
    run: Planned | None = None

    def leave(self) -> None:
        """Close the way to the process, which then ends, and wait for that."""
        self.connection.close()
        self.process.join()


class _Pool:
    """Hold processes that train runs. On exit they save what they train, and end.

    Args:
        processes: the most of them.
    """

    def __init__(self, processes: int) -> None:
        # A forked process cannot use CUDA.
        self._context = multiprocessing.get_context("spawn")
        self._most = processes
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, _Worker] = {}
        self._is_stopped = False

    @property
    def is_busy(self) -> bool:
        """Return whether a run is trained."""
        return bool(self._busy)

    @property
    def is_free(self) -> bool:
        """Return whether another run can begin."""
        return len(self._busy) < self._most

    def begin(self, run: Planned, place: Place) -> None:
        """Let a process train a run."""
        while self._idle:
            worker = self._idle.pop()
            try:
                worker.connection.send((run, place))
            except OSError:
                # It has ended in the meantime.
                worker.leave()
                continue
            break
        else:
            worker = self._started()
            worker.connection.send((run, place))
        worker.run = run
        self._busy[worker.connection] = worker

    def ended(self) -> Iterator[tuple[Planned, str | None]]:
        """Wait a moment. Yield the runs that end and how, None if their process died."""
        for connection in wait(list(self._busy), PAUSE):
            worker = self._busy.pop(connection)  # pyrefly: ignore
            run = worker.run
            assert run is not None
            try:
                answer = worker.connection.recv()
            except (EOFError, OSError):
                worker.leave()
                yield run, None
            else:
                self._idle.append(worker)
                yield run, answer

    def stop(self) -> None:
        """Ask all that train to save their runs and end, once."""
        if not self._is_stopped:
            self._is_stopped = True
            for worker in self._busy.values():
                worker.process.terminate()

    def _started(self) -> _Worker:
        connection, other = self._context.Pipe()
        process = self._context.Process(target=serve, args=(other,))
        with _blocked_signals():
            process.start()
        other.close()
        return _Worker(process, connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for worker in (*self._idle, *self._busy.values()):
            worker.leave()


@contextmanager
def _blocked_signals() -> Generator[None]:
    """Keep signals from a process that is started here. It unblocks them when it heeds them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    # The first process starts this one, which unblocks signals.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
