"""Tune, train and time every method of retrieval.

1. Each method gets one short run per learning rate of its grid, all with one seed.
2. The rate with the best mean reciprocal rank on the validation pairs is trained with three seeds.
3. Each method is timed alone, because the runs above share the device.

``python -m cwy.experiments.retrieval.sweep OUT [--device cuda] [--processes 8] [...]``
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from .recipes import METHODS

GRID = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
"""The learning rates of adapters."""
FULL_GRID = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
"""As many for all weights, which need smaller ones."""
SEEDS = (0, 1, 2)
TUNING = 150
"""The steps of a run of the tuning."""
TIMING = 60
"""The steps of a run that is timed."""
KEPT = ("config.json", "metrics.jsonl", "record.json", "diverged.txt")
"""The files of a run that are kept. Its weights are large."""


@dataclass(frozen=True)
class Run:
    """Describe one run of the sweep.

    Attributes:
        folder: its place in the folder of the sweep.
        settings: further ones, as ``--set`` takes them.
    """

    folder: str
    method: str
    lr: float
    seed: int
    settings: tuple[str, ...] = ()


def grid(method: str) -> tuple[float, ...]:
    """Return the learning rates that a method is tuned over."""
    if method == "full":
        return FULL_GRID
    return GRID


def trials(methods: Iterable[str]) -> list[Run]:
    """Return the runs of the tuning, those of the slowest method first."""
    short = (f"iterations={TUNING}", f"evaluate_every={TUNING}")
    runs = [
        Run(f"tuning/{method}-{lr:g}", method, lr, SEEDS[0], short)
        for method in methods
        for lr in grid(method)
    ]
    return sorted(runs, key=lambda run: run.method != "hra")


def finals(rates: dict[str, float]) -> list[Run]:
    """Return a run for each method and seed. All methods come with one seed before the next."""
    runs = [
        Run(f"retrieval/standard-{method}-seed{seed}", method, lr, seed)
        for seed in SEEDS
        for method, lr in rates.items()
    ]
    return sorted(runs, key=lambda run: (run.seed, run.method != "hra"))


def timings(rates: dict[str, float]) -> list[Run]:
    """Return a short run for each method."""
    short = (
        f"iterations={TIMING}",
        f"evaluate_every={TIMING}",
        f"log_every={TIMING // 2}",
        "pairs=20000",  # which are tokenized sooner
    )
    return [Run(f"timing/{method}", method, lr, SEEDS[0], short) for method, lr in rates.items()]


def read(out: Path, run: Run) -> dict[str, Any] | None:
    """Return the record of a run, or None if it has not finished."""
    record = out / run.folder / "record.json"
    if not record.is_file():
        return None
    return json.loads(record.read_text())


def score(out: Path, run: Run) -> float:
    """Return the mean reciprocal rank of a run at its end, on the validation pairs."""
    record = read(out, run)
    if record is None:
        return float("-inf")
    return record["final"]["validation"]["mrr"]


def best_rate(out: Path, method: str) -> float:
    """Return the learning rate of the best run of a method's tuning."""
    return max(trials([method]), key=lambda run: score(out, run)).lr


@dataclass(frozen=True)
class Sweep:
    """Hold what all runs have in common.

    Attributes:
        out: the folder of the sweep.
        options: of ``cwy train``.
        end: the moment after which no run is started.
    """

    out: Path
    options: Sequence[str]
    end: float

    def train(self, runs: Sequence[Run], processes: int) -> None:
        """Train runs, several at a time. Print a line about each when it ends."""
        begin = time.monotonic()
        with ThreadPoolExecutor(processes) as pool:
            waiting = {pool.submit(self._train, run): run for run in runs}
            for done in as_completed(waiting):
                run = waiting[done]
                seconds = time.monotonic() - begin
                print(
                    f"{seconds:6.0f} s  {run.folder}: {done.result()}, "
                    f"validation mrr {score(self.out, run):.4f}",
                    flush=True,
                )

    def _train(self, run: Run) -> str:
        folder = self.out / run.folder
        if read(self.out, run) is not None:
            return "was finished"
        if time.monotonic() > self.end:
            return "not started, the time was over"
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "cwy", "train", "retrieval", "--method", run.method]
        command += ["--seed", str(run.seed), "--out", str(folder), *self.options]
        for setting in (f"lr={run.lr:g}", *run.settings):
            command += ["--set", setting]
        with folder.with_name(f"{folder.name}.log").open("wb") as log:
            status = subprocess.call(command, stdout=log, stderr=subprocess.STDOUT)  # noqa: S603
        if folder.is_dir():
            _drop_weights(folder)
        return f"exit {status}"


def _drop_weights(folder: Path) -> None:
    """Remove what is large, and keep the settings, the log and the record."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in KEPT:
            path.unlink()


def summary(out: Path, rates: dict[str, float]) -> list[str]:
    """Return a line for each method: what it reached, with how many parameters, in which time."""
    lines = ["method      lr      first   mrr     seeds  parameters  ms a step  peak MB"]
    for method, lr in rates.items():
        runs = [read(out, run) for run in finals({method: lr})]
        found = [run["final"]["test"] for run in runs if run is not None]
        timed = read(out, timings({method: lr})[0])
        if not found or timed is None:
            lines.append(f"{method:10}  {lr:<6g}  not finished")
            continue
        first = mean(one["accuracy"] for one in found)
        mrr = mean(one["mrr"] for one in found)
        count = timed["data"]["trained parameters"]
        step = timed["final"]["train"]["step_ms"]
        memory = timed["peak_memory"] / 1e6
        lines.append(
            f"{method:10}  {lr:<6g}  {first:.4f}  {mrr:.4f}  {len(found):5}  {count:10,}  "
            f"{step:9.2f}  {memory:7.0f}"
        )
    return lines


def main() -> None:
    """Run the sweep."""
    parser = argparse.ArgumentParser(description="Tune, train and time the methods of retrieval.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after this")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--set", action="append", default=[])
    given = parser.parse_args()
    options = ["--device", given.device, "--precision", given.precision]
    for assignment in given.set:
        options += ["--set", assignment]
    sweep = Sweep(given.out, options, time.monotonic() + given.seconds)
    methods = given.methods.split(",")
    sweep.train(trials(methods), given.processes)
    rates = {method: best_rate(given.out, method) for method in methods}
    sweep.train(finals(rates), given.processes)
    Sweep(given.out, options, float("inf")).train(timings(rates), 1)
    text = "\n".join(summary(given.out, rates))
    (given.out / "summary.txt").write_text(f"{text}\n")
    print(text)


if __name__ == "__main__":
    main()
