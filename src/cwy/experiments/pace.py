"""Time training steps of recipes on a CPU: the record of how long whole runs take.

The times are processor seconds of one thread, which other programs hardly change. On an idle
machine a clock shows the same.

``python -m cwy.experiments.pace results/bench/cpu-2-threads/pace.jsonl`` writes it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from .. import _atomic
from .engine import optimizers
from .engine.checkpoint import environment
from .engine.task import Settings, load, settings

BATCHES = 12
"""Batches that are timed, at equal distances in an epoch or in the run: their lengths differ."""
STRIDE = 5
"""From one batch to the next, so that the first few lie all over the epoch."""
PATIENCE = 30.0
"""Processor seconds. A recipe that has taken longer gets no further batch."""


@dataclass(frozen=True)
class Named:
    """Name one run as ``cwy train`` would: its recipe, method and changed settings."""

    recipe: str
    method: str | None = None
    assignments: tuple[str, ...] = ()


RUNS = (
    Named("copying/small"),
    Named("copying/1000"),
    Named("copying/2000"),
    Named("copying/1000", "lstm"),
    Named("adding/small"),
    Named("adding/200"),
    Named("adding/750"),
    Named("mnist/small"),
    Named("mnist/170"),
    Named("mnist/512"),
    Named("kth/running"),
    Named("weizmann/walk"),
    Named("movingmnist/small"),
    Named("movingmnist/digits", None, ("epochs=1",)),
    Named("nmt/small"),
    Named("nmt/paper-cwy-128", None, ("epochs=1",)),
    Named("nmt/paper-lstm", None, ("epochs=1",)),
)


def measure(chosen: Settings) -> dict[str, Any]:
    """Time steps of a run: the batch, both passes and the optimizer. Return its record.

    ``seconds`` is the mean step times the steps of the run. Evaluations are not counted.
    """
    device = torch.device("cpu")
    task = load(chosen.task)(chosen, device)
    torch.manual_seed(chosen.seed)
    model = task.model()
    optimizer = optimizers.build(model, chosen.config)

    def train(step: int) -> float:
        begin = time.process_time()
        loss, _ = task.loss(model, task.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time() - begin

    begin = time.process_time()
    # The first step sets up what the others find.
    train(0)
    span = task.epoch or task.iterations
    times = []
    for count in range(BATCHES):
        place = count * STRIDE % BATCHES
        times.append(train((2 * place + 1) * span // (2 * BATCHES)))
        if time.process_time() - begin > PATIENCE:
            break
    return {
        "run": f"{chosen.task}/{chosen.recipe} {chosen.method}",
        "iterations": task.iterations,
        "step_ms": [round(seconds * 1e3, 3) for seconds in times],
        "seconds": mean(times) * task.iterations,
        "data": task.facts,
        "load": os.getloadavg(),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "cwy.experiments.pace", *sys.argv[1:]]),
        **environment(chosen, device),
    }


def main() -> None:
    """Time runs and write their record."""
    parser = argparse.ArgumentParser(description="Time training steps of recipes on a CPU.")
    parser.add_argument("file", type=Path)
    parser.add_argument("words", nargs="*", help="time only runs whose names have one of these")
    given = parser.parse_args()
    path = given.file
    words = given.words
    torch.set_num_threads(1)
    lines = {}
    if path.exists():
        lines = {json.loads(line)["run"]: line for line in path.read_text().splitlines()}
    for named in RUNS:
        chosen = settings(named.recipe, named.method, 0, named.assignments)
        name = f"{named.recipe} {chosen.method}"
        if words and not any(word in name for word in words):
            continue
        found = measure(chosen)
        print(f"{name}: {found['step_ms']} ms, {found['seconds']:.0f} s", flush=True)
        lines[found["run"]] = json.dumps(found)
        _atomic.write(path, "\n".join([*lines.values(), ""]).encode())


if __name__ == "__main__":
    main()
