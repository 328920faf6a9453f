"""Tune and train every method of retrieval, several runs at a time.

Each method gets one run per learning rate of its grid, all of one length. The rate with the best
mean reciprocal rank on the validation pairs is trained with two more seeds.

``python -m cwy.experiments.retrieval.sweep OUT [--device cuda] [--processes 8] [...]``
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from .recipes import METHODS

GRID = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
"""The learning rates of adapters."""
FULL_GRID = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
"""As many for all weights, which need smaller ones."""
SEEDS = (0, 1, 2)
KEPT = ("config.json", "metrics.jsonl", "record.json", "diverged.txt")
"""The files of a run that are kept. Its weights are large."""


@dataclass(frozen=True)
class Run:
    """One run of the sweep."""

    method: str
    lr: float
    seed: int

    @property
    def folder(self) -> str:
        """Return the name of its folder."""
        return f"{self.method}-{self.lr:g}-seed{self.seed}"


def grid(method: str) -> tuple[float, ...]:
    """Return the learning rates that a method is tuned over."""
    if method == "full":
        return FULL_GRID
    return GRID


def trials(methods: Iterable[str]) -> list[Run]:
    """Return the runs of the tuning, the slowest methods first."""
    runs = [Run(method, lr, SEEDS[0]) for method in methods for lr in grid(method)]
    return sorted(runs, key=lambda run: run.method != "hra")


def score(out: Path, run: Run) -> float:
    """Return the mean reciprocal rank of a run at its end, on the validation pairs."""
    record = out / run.folder / "record.json"
    if not record.is_file():
        return float("-inf")
    return json.loads(record.read_text())["final"]["validation"]["mrr"]


def best(out: Path, method: str) -> Run:
    """Return the best run of a method's tuning."""
    return max((Run(method, lr, SEEDS[0]) for lr in grid(method)), key=lambda run: score(out, run))


def train(out: Path, runs: list[Run], options: list[str], processes: int) -> Iterator[str]:
    """Train runs, several at a time, and return a line about each when it ends."""
    with ThreadPoolExecutor(processes) as pool:
        waiting = {pool.submit(_train, out, run, options): run for run in runs}
        for done in as_completed(waiting):
            run = waiting[done]
            yield f"{run.folder}: exit {done.result()}, validation mrr {score(out, run):.4f}"


def _train(out: Path, run: Run, options: list[str]) -> int:
    folder = out / run.folder
    if (folder / "record.json").is_file():
        return 0
    command = [sys.executable, "-m", "cwy", "train", "retrieval", "--method", run.method]
    command += ["--seed", str(run.seed), "--set", f"lr={run.lr:g}", "--out", str(folder), *options]
    with (out / f"{run.folder}.log").open("wb") as log:
        status = subprocess.call(command, stdout=log, stderr=subprocess.STDOUT)  # noqa: S603
    if folder.is_dir():
        _drop_weights(folder)
    return status


def _drop_weights(folder: Path) -> None:
    """Remove what is large, and keep the settings, the log and the record."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in KEPT:
            path.unlink()


def main() -> None:
    """Run the sweep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--set", action="append", default=[])
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    options = ["--device", given.device, "--precision", given.precision]
    for assignment in given.set:
        options += ["--set", assignment]
    methods = given.methods.split(",")
    begin = time.monotonic()
    for line in train(given.out, trials(methods), options, given.processes):
        print(f"{time.monotonic() - begin:6.0f} s  {line}", flush=True)
    chosen = [best(given.out, method) for method in methods]
    more = [Run(one.method, one.lr, seed) for one in chosen for seed in SEEDS[1:]]
    for line in train(given.out, more, options, given.processes):
        print(f"{time.monotonic() - begin:6.0f} s  {line}", flush=True)
    for one in chosen:
        print(f"{one.method}: learning rate {one.lr:g}")


if __name__ == "__main__":
    main()
