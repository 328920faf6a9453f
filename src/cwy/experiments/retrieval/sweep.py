"""Time, tune and train every method of retrieval.

1. Each method is timed alone, because the runs below share the device.
2. Each method gets one short run per learning rate of its grid, all with one seed.
3. The rate with the best mean reciprocal rank on the validation pairs is trained with three seeds.

``python -m cwy.experiments.retrieval.sweep OUT [--device cuda] [--processes 8] [...]``
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from ..engine import task
from ..engine.signals import outlast, status
from ..pool import SweepStopped, print_all
from ..sweeps import Place, Planned, read
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
UNTRAINED = Planned(
    "tuning/untrained",
    "retrieval",
    "full",
    SEEDS[0],
    ("lr=1e-12", "iterations=1", "evaluate_every=1"),
)
"""A run that leaves the encoder as it is, for comparison."""


def grid(method: str) -> tuple[float, ...]:
    """Return the learning rates that a method is tuned over."""
    if method == "full":
        return FULL_GRID
    return GRID


def trials(methods: Iterable[str]) -> list[Planned]:
    """Return the runs of the tuning, those of the slowest method first."""
    runs = [_trial(method, lr) for method in methods for lr in grid(method)]
    return sorted(runs, key=lambda run: run.method != "hra")


def _trial(method: str, lr: float) -> Planned:
    settings = (f"lr={lr:g}", f"iterations={TUNING}", f"evaluate_every={TUNING}")
    return Planned(f"tuning/{method}-{lr:g}", "retrieval", method, SEEDS[0], settings)


def finals(rates: dict[str, float]) -> list[Planned]:
    """Return a run for each method and seed: the slowest method, then one seed after another."""
    runs = [
        Planned(_named("retrieval", method, seed), "retrieval", method, seed, (f"lr={lr:g}",))
        for seed in SEEDS
        for method, lr in rates.items()
    ]
    return sorted(runs, key=lambda run: (run.method != "hra", run.seed))


def timings(methods: Iterable[str]) -> list[Planned]:
    """Return a few steps of each method at its default rate, to be run one after another."""
    return [_timing(method) for method in methods]


def _timing(method: str) -> Planned:
    short = (f"iterations={TIMING}", f"evaluate_every={TIMING}", f"log_every={TIMING // 2}")
    return Planned(_named("timing", method, SEEDS[0]), "retrieval", method, SEEDS[0], short)


def _named(folder: str, method: str, seed: int) -> str:
    return f"{folder}/standard-{method}-seed{seed}"


def score(out: Path, run: Planned) -> float:
    """Return the mean reciprocal rank of a run at its end, on the validation pairs."""
    record = read(out, run)
    if record is None:
        return float("-inf")
    return record["final"]["validation"]["mrr"]


def best_rates(out: Path, methods: Iterable[str]) -> dict[str, float]:
    """Return the learning rate of the best run of each method's tuning.

    A method of which no run has finished has none.
    """
    found = {}
    for method in methods:
        scores = {lr: score(out, _trial(method, lr)) for lr in grid(method)}
        best = max(scores, key=scores.__getitem__)
        if math.isfinite(scores[best]):
            found[method] = best
    return found


def summary(out: Path, rates: dict[str, float]) -> list[str]:
    """Return a line for each method: what it reached, with how many parameters, in which time."""
    lines = ["method      lr      tuned  first   mrr     seeds  parameters  step, ms   peak MB"]
    for method, lr in rates.items():
        tuned = sum(read(out, run) is not None for run in trials([method]))
        runs = [read(out, run) for run in finals({method: lr})]
        found = [run["final"]["test"] for run in runs if run is not None]
        alone = read(out, _timing(method))
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


def write_lines(out: Path, name: str, runs: Iterable[Planned]) -> None:
    """Write the records of short runs into one file, a line each, with their logged steps."""
    lines = []
    for run in runs:
        record = read(out, run)
        if record is None:
            continue
        logged = (out / run.folder / "metrics.jsonl").read_text().splitlines()
        steps = [one["step_ms"] for one in map(json.loads, logged) if "step_ms" in one]
        lines.append(json.dumps({"run": Path(run.folder).name, **record, "step_ms": steps}))
    (out / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def prepare(assignments: Sequence[str]) -> None:
    """Tokenize the sentences once for all runs."""
    config: Any = task.settings("retrieval", None, SEEDS[0], tuple(assignments)).config
    tokenizer = weights.find(config.weights).folder / "tokenizer.json"
    sentences.load(tokenizer, config.length, config.pairs, torch.device("cpu"))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main() -> None:
    """Run the sweep."""
    parser = argparse.ArgumentParser(description="Time, tune and train the methods of retrieval.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e7, help="start no run after this")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--set", action="append", default=[], help="key=value, for every run")
    given = parser.parse_args()
    methods = given.methods.split(",")
    place = Place(given.out, given.device, given.precision, time.time() + given.seconds)

    def train_all(runs: Sequence[Planned], processes: int) -> None:
        with_settings = [replace(run, settings=(*run.settings, *given.set)) for run in runs]
        failures = print_all(with_settings, place, processes)
        if failures:
            sys.exit(f"runs that failed: {failures}. The lines above state why.")

    prepare(given.set)
    alone = timings(methods)
    train_all(alone, 1)
    write_lines(given.out, "retrieval-speed", alone)
    if all(read(given.out, run) is None for run in alone):
        sys.exit(f"no method could be timed, see the logs in {given.out / 'timing'}")
    tuning = [*trials(methods), UNTRAINED]
    train_all(tuning, given.processes)
    write_lines(given.out, "retrieval-rates", tuning)
    rates = best_rates(given.out, methods)
    train_all(finals(rates), given.processes)
    text = "\n".join(summary(given.out, rates))
    (given.out / "summary.txt").write_text(f"{text}\n")
    print(text)


if __name__ == "__main__":
    outlast()
    try:
        main()
    except SweepStopped as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(stopped.status)
    except KeyboardInterrupt:
        print("stopped. The same command goes on.", file=sys.stderr)
        sys.exit(status(signal.SIGINT))
