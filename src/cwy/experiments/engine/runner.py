"""Start, sweep and resume runs. Each call returns an exit status, or raises what has one."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..data import DataError
from . import task
from .config import ConfigError, blaming_memory
from .display import Display
from .distributed import Group
from .files import Damaged
from .folder import CONFIG, Folder
from .loop import Loop
from .monitor import Diverged
from .signals import Stop, Stopped
from .task import Settings, differences

FAILED = 1
DEVICES = ("cpu", "cuda")
"""How the name of a device may begin."""
MEASURES = ("loss", "accuracy", "bleu")
AGAIN = "The same command continues all runs."


class RunError(Exception):
    """Report a run that cannot be started or go on, for a reason that the user can mend."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Hold the request of ``cwy train``: one run of every method with every seed.

    Attributes:
        what: ``TASK`` or ``TASK/RECIPE``.
        methods: by name. None is the recipe's own.
        seeds: of the runs.
        assignments: ``key=value`` texts.
        device, precision, compile: as in :class:`~.task.Settings`.
        out: the run's folder, or the folder of the runs if there are several.
    """

    what: str
    methods: Sequence[str | None] = (None,)
    seeds: Sequence[int] = (0,)
    assignments: Sequence[str] = ()
    device: str = "cpu"
    precision: str | None = None
    compile: bool = False
    out: Path | None = None

    def settings(self) -> list[Settings]:
        """Return the settings of each run. Mistakes raise."""
        check_device(self.device)
        if not self.methods:
            raise ConfigError("--method names none, e.g. 'cwy,lstm'.")
        return [self._settings(method, seed) for method in self.methods for seed in self.seeds]

    def _settings(self, method: str | None, seed: int) -> Settings:
        return task.settings(
            self.what,
            method,
            seed,
            tuple(self.assignments),
            device=self.device,
            precision=self.precision,
            compile=self.compile,
        )


@dataclass(frozen=True, slots=True)
class _Start:
    """Describe one run that is to be started, and what it reports to.

    Attributes:
        settings, folder: of the run.
        group: the processes.
        stop: hears of signals.
        console: for messages.
        go_on: whether a run that is not finished may go on.
        hint: is added to the message of a run that is stopped.
    """

    settings: Settings
    folder: Folder
    group: Group
    stop: Stop
    console: Console
    go_on: bool
    hint: str = ""


def train(sweep: Sweep, console: Console, stop: Stop) -> int:
    """Train the runs of a sweep, one after another. Those that are finished are skipped.

    A run that fails does not stop the others.
    """
    every = sweep.settings()
    place = Path("runs") / every[0].task
    group = Group(sweep.device)
    with group.joined():
        if len(every) == 1:
            folder = Folder(sweep.out or place / every[0].name)
            return _start(_Start(every[0], folder, group, stop, console, go_on=False))
        place = sweep.out or place
        statuses = []
        for one in every:
            folder = Folder(place / one.name)
            hint = f"\n{AGAIN}"
            statuses.append(
                _start_one_of_many(_Start(one, folder, group, stop, console, True, hint))
            )
        if group.first:
            console.print(f"All of them: cwy runs {place}, cwy report {place}", soft_wrap=True)
    return max(statuses)


def resume(path: Path, device: str | None, console: Console, stop: Stop) -> int:
    """Continue from the last checkpoint, or from the start without one.

    A finished run is left as it is, on a machine without its device, too.
    """
    folder = Folder(path)
    settings = folder.settings()
    if _is_finished(folder):
        # Nothing is left to compute.
        settings = replace(settings, device="cpu")
    elif device is not None:
        check_device(device)
        settings = replace(settings, device=device)
    else:
        _check_device_of(folder, settings.device)
    group = Group(settings.device)
    with group.joined():
        return _start(_Start(settings, folder, group, stop, console, go_on=True))


def check_device(name: str) -> None:
    """Raise unless torch can use this device."""
    if not name.startswith(DEVICES):
        raise ConfigError(f"--device must be cpu or cuda, got {name}.")
    problem = _problem_with_device(name)
    if problem:
        raise ConfigError(
            f"--device {name} can't be used: {problem}. See `cwy info` for the devices here."
        )


def _check_device_of(folder: Folder, name: str) -> None:
    """Raise unless torch can use the device that a run was started on."""
    problem = "it must be cpu or cuda"
    if name.startswith(DEVICES):
        problem = _problem_with_device(name)
    if problem:
        raise ConfigError(
            f"{folder.path / CONFIG} has device {name}, which can't be used here: {problem}. "
            f"To go on with another one: cwy resume {folder.path} --device cpu"
        )


def _problem_with_device(name: str) -> str:
    """Return why torch cannot use a device, empty if it can."""
    try:
        torch.empty(0, device=torch.device(name))
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0].rstrip(".")
    return ""


def _is_finished(folder: Folder) -> bool:
    """Return whether a run has finished. A record that cannot be read is named later."""
    try:
        return folder.finished
    except (ConfigError, OSError):
        return False


def _start_one_of_many(run: _Start) -> int:
    """Start one run of a sweep. Print its failure and return its status."""
    try:
        return _start(run)
    except Stopped:
        if run.group.first:
            run.console.print(AGAIN)
        raise
    except Exception as error:
        known = isinstance(error, RunError | Diverged)
        if run.group.size > 1 and (not known or isinstance(error.__cause__, OSError)):
            # Only this rank failed: the others are inside a step, and can't go on to the next run.
            raise
        if run.group.first:
            reason = f"\n{traceback.format_exc()}"
            if known:
                reason = f" {error}"
            run.console.print(f"{run.settings.name} failed:{reason}", soft_wrap=True)
        return getattr(error, "status", FAILED)


def _start(run: _Start) -> int:
    """Train one run, unless it is finished."""
    group = run.group
    folder = run.folder
    # The first rank looks: the others may be elsewhere, or come when it has begun to write.
    problem = b""
    if group.first:
        problem = _problem(run.settings, folder, run.go_on).encode()
    problem = group.broadcast(problem)
    if problem:
        raise RunError(problem.decode())
    display = Display(None)
    finished = b""
    if group.first:
        display = Display(run.console)
        if folder.finished:
            finished = b"finished"
    if group.broadcast(finished):
        display.say(f"{folder.path} is finished: nothing to do.")
        return 0
    record = _train(run, display, lambda: _leave(run, display))
    display.say(_summary(record, folder))
    return 0


def _leave(run: _Start, display: Display) -> str:
    """Claim the folder of a run that a signal ends, and return the message to print."""
    folder = run.folder
    # The bar can't be ended inside a line of its own.
    with suppress(RuntimeError):
        display.end()
    try:
        if run.group.first and not folder.exists:
            with folder.claim(run.settings):
                pass
    except ConfigError as error:
        return f"stopped before its first step: {error}"
    except OSError as error:
        return (
            "stopped before its first step: "
            f"cannot write to the folder {folder.path}: {error.strerror}."
        )
    where = "before its first step"
    if folder.last_checkpoint():
        where = "before it went on"
    return f"{Stopped(run.stop.signal, where, folder.path)}{run.hint}"


def _train(run: _Start, display: Display, leave: Callable[[], str]) -> dict[str, Any]:
    try:
        with blaming_memory():
            with run.stop.ending(leave):
                loop = Loop(run.settings, run.folder, run.group, display)
            with _writing(run.folder):
                return loop.run(run.stop, leave)
    except (ConfigError, DataError, Damaged) as error:
        raise RunError(str(error)) from error


@contextmanager
def _writing(folder: Folder) -> Generator[None]:
    """Name a disk that is full or cannot be written to."""
    try:
        yield
    except OSError as error:
        hint = ""
        if folder.last_checkpoint():
            hint = f" To go on from its last checkpoint: cwy resume {folder.path}"
        raise RunError(
            f"cannot write to the folder {folder.path}: {error.strerror or error}.{hint}"
        ) from error


def _problem(settings: Settings, folder: Folder, go_on: bool) -> str:
    """Return why the run cannot lie in this folder, empty if it can."""
    try:
        if folder.remains:
            return (
                f"{folder.path} holds parts of a run, but not its config.json. "
                "Choose another --out."
            )
        if not folder.exists:
            return ""
        there = folder.settings().to_dict()
        finished = folder.finished
    except OSError as error:
        return f"cannot read the folder {folder.path}: {error.strerror}."
    except ConfigError as error:
        return str(error)
    differ = differences(there, settings.to_dict())
    if differ:
        return f"{folder.path} holds another run: {', '.join(differ)}. Choose another --out."
    if folder.diverged and not go_on:
        return (
            f"{folder.path} holds a run that diverged. Change a setting, such as lr, and choose "
            "another --out."
        )
    if not (go_on or finished):
        return f"{folder.path} holds a run that is not finished. To go on: cwy resume {folder.path}"
    return ""


def _summary(record: dict[str, Any], folder: Folder) -> str:
    """Return what a finished run prints at its end."""
    from ..report import read_run
    from ..report.panels import arrange

    split = next(split for split in ("test", "validation", "train") if split in record["final"])
    final = [
        f"{split} {name} {value:.4g}"
        for name, value in record["final"][split].items()
        if name in MEASURES
    ]
    lines = [f"Finished, {record['seconds']:.1f} s of training. At the end: {', '.join(final)}"]
    best = record["best"]
    if best:
        lines.append(f"Best {best['metric']}: {best['value']:.4g}, at step {best['step']}")
    (panel,) = arrange([read_run(folder.path)])
    lines.append(f"{panel.title}: {panel.finding}.")
    lines.append(f"The run: {folder.path}")
    return "\n".join(lines)
