"""What ``cwy train``, ``cwy resume`` and ``cwy runs`` do. Each returns an exit status, or raises what has one."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from ..data import DataError
from . import task
from .config import ConfigError
from .display import Display
from .distributed import Group
from .files import Damaged
from .loop import Loop, Stopped
from .meter import Diverged
from .run import Folder, differences
from .signals import Stop
from .task import Settings

FAILED = 1
MEASURES = ("loss", "accuracy", "bleu")


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
) -> int:
    """Runs every method (None is the recipe's own) with every seed, one after another; those that are done already are skipped.

    With one method and one seed ``out`` is the run's folder; else it holds one folder a run. A run that fails does not
    stop the others.
    """
    check_device(device)
    if not methods:
        raise ConfigError("no method is named.")
    every = [
        task.settings(what, method, seed, tuple(assignments), device=device, precision=precision, compile=compile)
        for method in methods
        for seed in seeds
    ]
    name = every[0].task
    group, stop = Group(device), Stop()
    with group.joined():
        if len(every) == 1:
            folder = Folder(out or Path("runs") / name / every[0].name)
            return _start(every[0], folder, group, stop, console, go_on=False)
        statuses = [_sweep(one, Folder((out or Path("runs") / name) / one.name), group, stop, console) for one in every]
    return max(statuses)


def resume(path: Path, device: str | None, console: Console) -> int:
    """Goes on from the last checkpoint, or from the start if there is none; a finished run is left as it is."""
    folder = Folder(path)
    settings = folder.settings()
    settings = settings if device is None else replace(settings, device=device)
    check_device(settings.device)
    group = Group(settings.device)
    with group.joined():
        return _start(settings, folder, group, Stop(), console, go_on=True)


def check_device(name: str) -> None:
    """Raises unless torch can use this device."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--device {name} can't be used: {reason}. See `cwy info` for the devices here.") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be cpu or cuda, got {name}.")


def _sweep(settings: Settings, folder: Folder, group: Group, stop: Stop, console: Console) -> int:
    """One run of many: its failure is told, and its status returned."""
    try:
        return _start(settings, folder, group, stop, console, go_on=True)
    except Stopped:
        raise
    except (RunError, Diverged) as error:
        if group.first:
            console.print(f"{settings.name} failed: {error}", soft_wrap=True)
        return getattr(error, "status", FAILED)
    except Exception:
        if group.first:
            console.print(f"{settings.name} failed:\n{traceback.format_exc()}", soft_wrap=True)
        return FAILED


def _start(settings: Settings, folder: Folder, group: Group, stop: Stop, console: Console, go_on: bool) -> int:
    """Runs one, unless it is done."""
    # The first rank looks: the others may be elsewhere, or come when it has begun to write.
    problem = group.broadcast(_problem(settings, folder, go_on).encode() if group.first else b"")
    if problem:
        raise RunError(problem.decode())
    display = Display(console if group.first else None)
    if group.broadcast(b"finished" if folder.finished else b""):
        display.say(f"{folder.path} is finished: nothing to do.")
        return 0
    try:
        loop = Loop(settings, folder, group, display)
    except (ValueError, TypeError, DataError) as error:
        raise RunError(str(error)) from error
    try:
        with stop:
            record = loop.run(stop)
    except (ConfigError, Damaged) as error:
        raise RunError(str(error)) from error
    except OSError as error:
        hint = f" To go on from its last checkpoint: cwy resume {folder.path}" if folder.last_checkpoint() else ""
        raise RunError(f"cannot write to the folder {folder.path}: {error.strerror or error}.{hint}") from error
    display.say(_told(record, folder))
    return 0


def _problem(settings: Settings, folder: Folder, go_on: bool) -> str:
    """Why the run can't lie in this folder; empty if it can."""
    try:
        if folder.remains:
            return f"{folder.path} holds parts of a run, but not its config.json. Choose another --out."
        if not folder.exists:
            return ""
        there, here = folder.settings().to_dict(), settings.to_dict()
    except OSError as error:
        return f"cannot read the folder {folder.path}: {error.strerror}."
    differ = differences(there, here)
    if differ:
        return f"{folder.path} holds another run: {', '.join(differ)}. Choose another --out."
    if not (go_on or folder.finished):
        return f"{folder.path} holds a run that is not finished. To go on: cwy resume {folder.path}"
    return ""


def _told(record: dict, folder: Folder) -> str:
    split = next(split for split in ("test", "validation", "train") if split in record["final"])
    final = ", ".join(f"{split} {name} {value:.4g}" for name, value in record["final"][split].items() if name in MEASURES)
    best = record["best"]
    told = f"\nBest {best['metric']}: {best['value']:.4g}, at step {best['step']}" if best else ""
    return f"Finished, {record['seconds']:.1f} s of training. At the end: {final}{told}\nThe run: {folder.path}"
