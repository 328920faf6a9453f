"""Time, tune and train every method of retrieval.

1. Each method is timed alone, because the runs below share the device.
2. Each method gets one short run per learning rate of its grid, all with one seed.
3. The rate with the best mean reciprocal rank on the validation pairs is trained with three seeds.

``python -m cwy.experiments.retrieval.sweep OUT [--device cuda] [--processes 8] [...]``
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from ..engine import task
from . import sentences, weights
from .recipes import METHODS

GRID = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
"""The learning rates of adapters."""
FULL_GRID = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
"""As many for all weights, which need smaller ones."""
SEEDS = (0, 1, 2)
TUNING = 100
"""The steps of a run of the tuning."""
TIMING = 60
"""The steps of a run that is timed."""
TIMED = "timing"
"""The folder of the runs that are timed."""
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


UNTRAINED = Run("tuning/untrained", "full", 1e-12, 0, ("iterations=1", "evaluate_every=1"))
"""A run that leaves the encoder as it is, for comparison."""


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
    """Return a run for each method and seed: the slowest method, then one seed after another."""
    runs = [
        Run(f"retrieval/standard-{method}-seed{seed}", method, lr, seed)
        for seed in SEEDS
        for method, lr in rates.items()
    ]
    return sorted(runs, key=lambda run: (run.method != "hra", run.seed))


def timed(out: Path, method: str) -> dict[str, Any] | None:
    """Return the record of a method's timed run, or None if it has not finished."""
    return _record(out / timed_folder(method))


def timed_folder(method: str) -> str:
    """Return the place of a method's timed run in the folder of the sweep."""
    return f"{TIMED}/standard-{method}-seed{SEEDS[0]}"


def read(out: Path, run: Run) -> dict[str, Any] | None:
    """Return the record of a run, or None if it has not finished."""
    return _record(out / run.folder)


def _record(folder: Path) -> dict[str, Any] | None:
    file = folder / "record.json"
    if not file.is_file():
        return None
    return json.loads(file.read_text())


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
        seconds: after which runs are stopped, and none is started.
        begin: the moment at which the sweep began.
    """

    out: Path
    options: Sequence[str]
    seconds: float
    begin: float = field(default_factory=time.monotonic)

    @property
    def passed(self) -> float:
        """Return the seconds since the sweep began."""
        return time.monotonic() - self.begin

    def say(self, text: str) -> None:
        """Print a line with the time."""
        print(f"{self.passed:6.0f} s  {text}", flush=True)

    def time_alone(self, methods: Sequence[str]) -> None:
        """Train each method for a few steps at its default rate, one after another."""
        short = (f"iterations={TIMING}", f"evaluate_every={TIMING}", f"log_every={TIMING // 2}")
        folder = self.out / TIMED
        if len(methods) == 1:
            folder = self.out / timed_folder(methods[0])
        result = self._call(folder, ",".join(methods), SEEDS[0], short)
        self.say(f"{TIMED}: {result}")

    def train(self, runs: Sequence[Run], processes: int) -> None:
        """Train runs, several at a time. Print a line about each when it ends."""
        with ThreadPoolExecutor(processes) as pool:
            waiting = {pool.submit(self._train, run): run for run in runs}
            for done in as_completed(waiting):
                run = waiting[done]
                found = f"validation mrr {score(self.out, run):.4f}"
                self.say(f"{run.folder}: {done.result()}, {found}")

    def _train(self, run: Run) -> str:
        folder = self.out / run.folder
        if read(self.out, run) is not None:
            return "was finished"
        if self.passed > self.seconds:
            return "not started, the time was over"
        # What a sweep that was stopped left of this run.
        shutil.rmtree(folder, ignore_errors=True)
        return self._call(folder, run.method, run.seed, (f"lr={run.lr:g}", *run.settings))

    def _call(self, folder: Path, method: str, seed: int, settings: Sequence[str]) -> str:
        """Call ``cwy train``, and keep the small files that it wrote."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "cwy", "train", "retrieval", "--method", method]
        command += ["--seed", str(seed), "--out", str(folder), *self.options]
        for setting in settings:
            command += ["--set", setting]
        written = folder.with_name(f"{folder.name}.log")
        with written.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)  # noqa: S603
            try:
                status = process.wait(max(0.0, self.seconds - self.passed))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                return "stopped, the time was over"
            finally:
                _drop_weights(folder)
        if status == 0:
            return "finished"
        last = written.read_text(errors="replace").strip().splitlines()[-1:]
        return f"exit {status}, {' '.join(last)}"


def _drop_weights(folder: Path) -> None:
    """Remove what is large, and keep the settings, the log and the record."""
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in KEPT:
            path.unlink()


def summary(out: Path, rates: dict[str, float]) -> list[str]:
    """Return a line for each method: what it reached, with how many parameters, in which time."""
    lines = ["method      lr      tuned  first   mrr     seeds  parameters  ms a step  peak MB"]
    for method, lr in rates.items():
        tuned = sum(read(out, run) is not None for run in trials([method]))
        runs = [read(out, run) for run in finals({method: lr})]
        found = [run["final"]["test"] for run in runs if run is not None]
        alone = timed(out, method)
        if not found or alone is None:
            lines.append(f"{method:10}  {lr:<6g}  {tuned:5}  not finished")
            continue
        first = mean(one["accuracy"] for one in found)
        mrr = mean(one["mrr"] for one in found)
        count = alone["data"]["trained parameters"]
        step = alone["final"]["train"]["step_ms"]
        memory = alone.get("peak_memory", 0) / 1e6
        lines.append(
            f"{method:10}  {lr:<6g}  {tuned:5}  {first:.4f}  {mrr:.4f}  {len(found):5}  "
            f"{count:10,}  {step:9.2f}  {memory:7.0f}"
        )
    return lines


def write_lines(out: Path, name: str, folders: Iterable[str]) -> None:
    """Write the records of short runs into one file, a line each, with their logged steps."""
    lines = []
    for folder in folders:
        record = _record(out / folder)
        if record is None:
            continue
        logged = (out / folder / "metrics.jsonl").read_text().splitlines()
        steps = [one["step_ms"] for one in map(json.loads, logged) if "step_ms" in one]
        lines.append(json.dumps({"run": Path(folder).name, **record, "step_ms": steps}))
    (out / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def prepare(assignments: Sequence[str], processes: int) -> None:
    """Tokenize the sentences once for all runs, and share the cores among these."""
    config: Any = task.settings("retrieval", None, SEEDS[0], tuple(assignments)).config
    tokenizer = weights.find(config.weights).folder / "tokenizer.json"
    sentences.load(tokenizer, config.length, config.pairs, torch.device("cpu"))
    threads = max(1, (os.cpu_count() or 1) // processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main() -> None:
    """Run the sweep."""
    parser = argparse.ArgumentParser(description="Time, tune and train the methods of retrieval.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e7, help="stop after this time")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--set", action="append", default=[])
    given = parser.parse_args()
    options = ["--device", given.device, "--precision", given.precision]
    for assignment in given.set:
        options += ["--set", assignment]
    sweep = Sweep(given.out, options, given.seconds)
    methods = given.methods.split(",")
    prepare(given.set, given.processes)
    sweep.say("sentences are tokenized")
    sweep.time_alone(methods)
    write_lines(given.out, "retrieval-speed", map(timed_folder, methods))
    if all(timed(given.out, method) is None for method in methods):
        sys.exit(f"no method could be timed, see {given.out / TIMED}.log")
    tuning = [*trials(methods), UNTRAINED]
    sweep.train(tuning, given.processes)
    write_lines(given.out, "retrieval-rates", (run.folder for run in tuning))
    rates = {method: best_rate(given.out, method) for method in methods}
    sweep.train(finals(rates), given.processes)
    text = "\n".join(summary(given.out, rates))
    (given.out / "summary.txt").write_text(f"{text}\n")
    print(text)


if __name__ == "__main__":
    main()
