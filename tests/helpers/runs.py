"""Small runs, trained in this process or by a command, and what they leave."""

import io
import json
import subprocess
import time
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import load_file

from cwy.experiments.engine import runner, task
from cwy.experiments.engine.display import Display
from cwy.experiments.engine.distributed import Group
from cwy.experiments.engine.folder import Folder
from cwy.experiments.engine.loop import Loop
from cwy.experiments.engine.signals import Stop

SETTINGS = {
    "T": 5,
    "hidden_size": 12,
    "batch_size": 7,
    "iterations": 300,
    "log_every": 5,
    "evaluate_every": 20,
    "save_every": 7,
}


def arguments(out: Path, *more: str, what: str = "copying/small", **settings: object) -> list[str]:
    every = {**SETTINGS, **settings}
    return [
        "train",
        what,
        "--out",
        str(out),
        *more,
        *(part for k, v in every.items() for part in ("--set", f"{k}={v}")),
    ]


def train(
    out: Path,
    methods=("cwy",),
    seeds=(0,),
    what="copying/small",
    precision="float32",
    **settings: object,
) -> tuple[int, str]:
    """``cwy train`` in this process: its status, and what it printed."""
    console, every = Console(file=io.StringIO(), width=100), {**SETTINGS, **settings}
    texts = [f"{key}={value}" for key, value in every.items()]
    sweep = runner.Sweep(what, methods, seeds, texts, precision=precision, out=out)
    status = runner.train(sweep, console, Stop())
    return status, console.file.getvalue()


def loop(folder: Path, method: str = "cwy", **settings: object) -> Loop:
    """A run that is set up but not started."""
    texts = tuple(f"{key}={value}" for key, value in (SETTINGS | settings).items())
    return Loop(
        task.settings("copying/small", method, assignments=texts),
        Folder(folder),
        Group("cpu"),
        Display(None),
    )


def resume(folder: Path, device: str | None = None) -> tuple[int, str]:
    """``cwy resume`` in this process."""
    console = Console(file=io.StringIO(), width=100)
    return runner.resume(folder, device, console, Stop()), console.file.getvalue()


def rows(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    return (
        [
            json.loads(line)
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        if path.exists()
        else []
    )


def numbers(folder: Path) -> list[dict]:
    """The log without the times."""
    return [
        {k: v for k, v in row.items() if k not in ("seconds", "step_ms")} for row in rows(folder)
    ]


def weights(folder: Path, name: str = "weights.safetensors") -> dict[str, torch.Tensor]:
    return load_file(folder / name)


def until(process: subprocess.Popen, folder: Path, step: int) -> None:
    """Waits until a run has logged a step."""
    while not any(row["step"] >= step for row in rows(folder)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
