"""What ``cwy train``, ``cwy resume`` and ``cwy runs`` do. Each returns an exit status, or raises what has one."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
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
from .loop import Loop
from .meter import Diverged
from .run import Folder, differences
from .signals import Stop, Stopped
from .task import Settings

FAILED = 1
MEASURES = ("loss", "accuracy", "bleu")
AGAIN = "The same command goes on with all of them."


class RunError(Exception):
    """A run that can't be started or go on, for a reason that is the user's to mend."""


def train(
    what: str,
    methods: Sequence[str | None],
    seeds: Sequence[int],
    assignments: Sequence[str],
    device: str,
    precision: str | None,
    compile: bool,
    out: Path | None,
    console: Console,
    stop: Stop,
) -> int:
    """Runs every method (None is the recipe's own) with every seed, one after another; those that are done already are skipped.

    With one method and one seed ``out`` is the run's folder; else it holds one folder a run. A run that fails does not
    stop the others.
    """
    check_device(device)
    if not methods:
        raise ConfigError("--method names none, e.g. 'cwy,lstm'.")
    every = [
        task.settings(
            what,
            method,
            seed,
            tuple(assignments),
            device=device,
            precision=precision,
            compile=compile,
        )
        for method in methods
        for seed in seeds
    ]
    group, place = Group(device), Path("runs") / every[0].task
    with group.joined():
        if len(every) == 1:
            return _start(
                every[0], Folder(out or place / every[0].name), group, stop, console, go_on=False
            )
        place = out or place
        statuses = [_sweep(one, Folder(place / one.name), group, stop, console) for one in every]
        if group.first:
            console.print(f"All of them: cwy runs {place}, cwy report {place}", soft_wrap=True)
    return max(statuses)


def resume(path: Path, device: str | None, console: Console, stop: Stop) -> int:
    """Goes on from the last checkpoint, or from the start if there is none; a finished run is left as it is."""
    folder = Folder(path)
    settings = folder.settings()
    settings = settings if device is None else replace(settings, device=device)
    check_device(settings.device)
    group = Group(settings.device)
    with group.joined():
        return _start(settings, folder, group, stop, console, go_on=True)


def check_device(name: str) -> None:
    """Raises unless torch can use this device."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"--device {name} can't be used: {reason}. See `cwy info` for the devices here."
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be cpu or cuda, got {name}.")


def _sweep(settings: Settings, folder: Folder, group: Group, stop: Stop, console: Console) -> int:
    """One run of many: its failure is told, and its status returned."""
    try:
        return _start(settings, folder, group, stop, console, go_on=True, hint=f"\n{AGAIN}")
    except Stopped:
        if group.first:
            console.print(AGAIN)
        raise
    except Exception as error:
        known = isinstance(error, RunError | Diverged)
        if group.size > 1 and (not known or isinstance(error.__cause__, OSError)):
            # One rank's own: the others are amid a step, and can't go on to the next run with it.
            raise
        if group.first:
            told = f" {error}" if known else f"\n{traceback.format_exc()}"
            console.print(f"{settings.name} failed:{told}", soft_wrap=True)
        return getattr(error, "status", FAILED)


def _start(
    settings: Settings,
    folder: Folder,
    group: Group,
    stop: Stop,
    console: Console,
    go_on: bool,
    hint: str = "",
) -> int:
    """Runs one, unless it is done."""
    # The first rank looks: the others may be elsewhere, or come when it has begun to write.
    problem = group.broadcast(_problem(settings, folder, go_on).encode() if group.first else b"")
    if problem:
        raise RunError(problem.decode())
    display = Display(console if group.first else None)
    if group.broadcast(b"finished" if group.first and folder.finished else b""):
        display.say(f"{folder.path} is finished: nothing to do.")
        return 0

    def leave() -> str:
        # The bar can't be ended amid a line of its own.
        with suppress(RuntimeError):
            display.end()
        try:
            if group.first and not folder.exists:
                with folder.claim(settings):
                    pass
        except ConfigError as error:
            return f"stopped before its first step; {error}"
        except OSError as error:
            return f"stopped before its first step; cannot write to the folder {folder.path}: {error.strerror}."
        where = "before it went on" if folder.last_checkpoint() else "before its first step"
        return f"{Stopped(stop.signal, where, folder.path)}{hint}"

    record = _train(settings, folder, group, stop, display, leave)
    display.say(_told(record, folder))
    return 0


def _train(
    settings: Settings,
    folder: Folder,
    group: Group,
    stop: Stop,
    display: Display,
    leave: Callable[[], str],
) -> dict[str, Any]:
    try:
        with blaming_memory():
            with stop.ending(leave):
                loop = Loop(settings, folder, group, display)
            with _writing(folder):
                return loop.run(stop, leave)
    except (ConfigError, DataError, Damaged) as error:
        raise RunError(str(error)) from error


@contextmanager
def _writing(folder: Folder) -> Generator[None]:
    """A disk that is full or can't be written to is named."""
    try:
        yield
    except OSError as error:
        hint = (
            f" To go on from its last checkpoint: cwy resume {folder.path}"
            if folder.last_checkpoint()
            else ""
        )
        raise RunError(
            f"cannot write to the folder {folder.path}: {error.strerror or error}.{hint}"
        ) from error


def _problem(settings: Settings, folder: Folder, go_on: bool) -> str:
    """Why the run can't lie in this folder; empty if it can."""
    try:
        if folder.remains:
            return f"{folder.path} holds parts of a run, but not its config.json. Choose another --out."
        if not folder.exists:
            return ""
        there, here, finished = folder.settings().to_dict(), settings.to_dict(), folder.finished
    except OSError as error:
        return f"cannot read the folder {folder.path}: {error.strerror}."
    except ConfigError as error:
        return str(error)
    differ = differences(there, here)
    if differ:
        return f"{folder.path} holds another run: {', '.join(differ)}. Choose another --out."
    if not (go_on or finished):
        return f"{folder.path} holds a run that is not finished. To go on: cwy resume {folder.path}"
    return ""


def _told(record: dict[str, Any], folder: Folder) -> str:
    from ..report import read_run
    from ..report.panels import arrange

    split = next(split for split in ("test", "validation", "train") if split in record["final"])
    final = ", ".join(
        f"{split} {name} {value:.4g}"
        for name, value in record["final"][split].items()
        if name in MEASURES
    )
    best = record["best"]
    told = f"\nBest {best['metric']}: {best['value']:.4g}, at step {best['step']}" if best else ""
    (panel,) = arrange([read_run(folder.path)])
    return (
        f"Finished, {record['seconds']:.1f} s of training. At the end: {final}{told}\n"
        f"{panel.title}: {panel.finding}.\nThe run: {folder.path}"
    )
