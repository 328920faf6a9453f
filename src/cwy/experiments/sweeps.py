"""Train many runs, several at a time, in processes that stay for the next run."""

from __future__ import annotations

import gc
import json
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from threading import Timer
from typing import Any

from rich.console import Console

from .. import _atomic
from .._provenance import commit
from .engine import runner
from .engine.folder import CONFIG, DIVERGED, METRICS, RECORD, Folder
from .engine.monitor import Diverged
from .engine.signals import Stop, Stopped
from .engine.task import Settings, differences

ATTEMPTS = 2
"""How often a run is begun if its process dies."""
STOPPED = "stopped, and saved"
"""How a run ends at its deadline."""
KEPT = (CONFIG, METRICS, RECORD, DIVERGED)
"""The files of a run that are kept. Its weights are large."""


@dataclass(frozen=True)
class Planned:
    """Name one run of a sweep.

    Attributes:
        folder: its place in the folder of the sweep.
        what: ``TASK`` or ``TASK/RECIPE``.
        method, seed: as ``cwy train`` takes them.
        settings: ``key=value`` texts, as ``--set`` takes them.
    """

    folder: str
    what: str
    method: str
    seed: int
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """Hold what all runs of a sweep have in common.

    Attributes:
        out: the folder of the sweep.
        device, precision: as ``cwy train`` takes them.
        end: the moment, as :func:`time.time` counts, after which no run is started.
        stop: the moment at which runs are saved and stopped. The next sweep goes on with them.
    """

    out: Path
    device: str = "cpu"
    precision: str = "float32"
    end: float = float("inf")
    stop: float = float("inf")


class Deadline(Stop):
    """Ask a run to save its state and stop at a moment, as a signal does."""

    @contextmanager
    def until(self, moment: float) -> Generator[None]:
        """Ask at this moment, as :func:`time.time` counts, unless the block has ended."""
        timer = None
        if moment < float("inf"):
            timer = Timer(max(moment - time.time(), 0), self._ask)
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()

    @contextmanager
    def ending(self, leave: Callable[[], str]) -> Generator[None]:
        """Change nothing. The process stays for other runs, and this one stops after a step."""
        yield

    def _ask(self) -> None:
        self.signal = signal.SIGTERM


def read(out: Path, run: Planned) -> dict[str, Any] | None:
    """Return the record of a run, or None if it has not finished."""
    record = out / run.folder / RECORD
    if not record.is_file():
        return None
    return json.loads(record.read_text())


def lines(out: Path, runs: Iterable[Planned]) -> list[str]:
    """Return a line of JSON for each run: its settings, and its record if it has finished."""
    made = []
    for run in runs:
        record = read(out, run)
        line: dict[str, Any] = {"run": run.folder, "status": "not finished"}
        if record is not None:
            line["status"] = "finished"
            line |= record
        else:
            line["method"] = run.method
            line["settings"] = list(run.settings)
            line["commit"] = commit()
            if (out / run.folder / DIVERGED).is_file():
                line["status"] = "diverged"
        made.append(json.dumps(line))
    return made


def restore(out: Path, known: Iterable[str]) -> None:
    """Write the records that :func:`lines` returned, so that their runs are not trained again."""
    for text in known:
        record = json.loads(text)
        folder = out / record.pop("run")
        status = record.pop("status")
        if status == "not finished":
            continue
        folder.mkdir(parents=True, exist_ok=True)
        if status == "finished":
            _atomic.write(folder / RECORD, f"{json.dumps(record, indent=2)}\n".encode())
        else:
            _atomic.write(folder / DIVERGED, b"as in an earlier sweep\n")


def merge(path: Path, made: Iterable[str]) -> None:
    """Write the lines of runs into a file. Lines of other runs stay."""
    every = list(made)
    if path.is_file():
        every = [*path.read_text().splitlines(), *every]
    by_run = {json.loads(text)["run"]: text for text in every}
    path.parent.mkdir(parents=True, exist_ok=True)
    _atomic.write(path, "".join(f"{text}\n" for text in by_run.values()).encode())


def train(runs: Sequence[Planned], place: Place, processes: int) -> Iterator[str]:
    """Train runs, several at a time. Yield a line about each when it ends.

    A run that diverges or fails does not stop the others. A run that finished or diverged before
    is not trained again, and one whose folder holds other settings fails. If a process dies, the
    runs that it leaves are tried once more.
    """
    begin = time.time()
    for run in runs:
        # A sweep that was killed may have left them.
        _running(place.out, run).unlink(missing_ok=True)
    attempts: Counter[Planned] = Counter()
    left = list(runs)
    while left:
        died = []
        # A forked process cannot use CUDA.
        pool = ProcessPoolExecutor(
            processes, mp_context=get_context("spawn"), initializer=_use_one_thread
        )
        with pool:
            waiting = {pool.submit(_train, run, place): run for run in left}
            for done in as_completed(waiting):
                run = waiting[done]
                if isinstance(done.exception(), BrokenProcessPool):
                    died.append(run)
                else:
                    yield f"{time.time() - begin:6.0f} s  {run.folder}: {_status(done)}"
        left = []
        # A process that dies takes the whole pool with it. Most of these runs had not begun.
        for run in died:
            if _running(place.out, run).exists():
                _running(place.out, run).unlink()
                attempts[run] += 1
        for run in died:
            if attempts[run] < ATTEMPTS and any(attempts[one] for one in died):
                left.append(run)
            else:
                yield f"{time.time() - begin:6.0f} s  {run.folder}: failed: its process died"


def _status(done: Future[str]) -> str:
    """Return how a run ended."""
    error = done.exception()
    if error is None:
        return done.result()
    reason = str(error).strip().partition("\n")[0]
    return f"failed: {type(error).__name__}: {reason}"


def _log(out: Path, run: Planned) -> Path:
    return out / f"{run.folder}.log"


def _running(out: Path, run: Planned) -> Path:
    """Return a file that exists while the run is trained."""
    return out / f"{run.folder}.running"


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _train(run: Planned, place: Place) -> str:
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
    (wanted,) = request.settings()
    record = read(place.out, run)
    begun = folder.is_dir() and Folder(folder).last_checkpoint() is not None
    there = None
    if record is not None:
        there = Settings.from_dict(record["config"])
    elif begun:
        there = Folder(folder).settings()
    if there is not None:
        differ = differences(there.to_dict(), wanted.to_dict())
        if differ:
            return f"failed: {folder} holds another run: {', '.join(differ)}. Choose another folder"
    if record is not None:
        return "was finished"
    if (folder / DIVERGED).is_file():
        return "diverged before"
    if time.time() > min(place.end, place.stop):
        return "not started, the time was over"
    if not begun:
        # What a run that was killed left behind.
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
    running = _running(place.out, run)
    running.touch()
    try:
        ended = _begin(request, folder, begun, _log(place.out, run), place.stop)
    finally:
        running.unlink()
        _free_memory()
    if ended != STOPPED:
        _drop_weights(folder)
    return ended


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
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
