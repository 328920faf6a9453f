"""Time training steps of translation on a GPU, in plain calls and as CUDA graphs.

An epoch has batches of several lengths. The record has the median for each length, and the mean
over the batches of an epoch. Networks are timed one after another, so that they can be compared.

``python -m cwy.experiments.nmt.speed results/bench/h200/translation-pace.jsonl`` writes it.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ...cudagraph import CapturedCall, CaptureError
from ..engine.checkpoint import environment
from ..engine.display import Display
from ..engine.distributed import Group
from ..engine.files import Damaged
from ..engine.folder import Folder
from ..engine.loop import Loop
from ..engine.monitor import Diverged
from ..engine.task import Batch, settings
from ..sweeps import merge
from .networks import Network
from .sweep import named_networks

TIMED = (
    "lstm,gru,rnn-tanh,rnn-relu,cwy-64-relu,cwy-128-relu,cwy-256-relu,cwy-512-relu,cwy-1024-relu,"
    "cwy-128-abs,cwy-128-leaky_relu,cwy-128-modrelu,cwy-128-tanh,cwy-256-tanh-gate,"
    "cwy-128-tanh-gate-thin,cwy-256-tanh-gate-thin,cwy-512-tanh-gate-thin,"
    "scornn-relu,exprnn-relu,rgd-relu"
)
"""Those that are timed unless others are named."""
SETTINGS = ("lr=3e-4", "orthogonal_lr=3e-4", "dropout=0.3")
"""Settings of all networks. A step takes the same time with others."""
RARE = 0.01
"""Lengths with a smaller share of the batches are left out."""
REPEATS = 5
"""How often a mean over several steps is taken. The median of these means counts."""
SECONDS = 0.03
"""The least time of a mean."""
PRECISIONS = ("float32", "bfloat16")


def measure(network: Network, precision: str) -> dict[str, Any]:
    """Time steps of a network. Return its record."""
    chosen = settings(
        "nmt/paper",
        network.method,
        0,
        (*network.settings, *SETTINGS),
        device="cuda",
        precision=precision,
    )
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(chosen, Folder(Path(folder)), Group("cuda"), Display(None))
        lengths = _lengths(loop)
        if loop.guard.bad:
            # Skipped steps take less time.
            raise Diverged(f"{network.name}: a loss or a gradient of the timed steps is not finite")
    return {
        "run": f"{network.name} {precision}",
        "plain_ms": _mean(lengths, "plain_ms"),
        "graph_ms": _mean(lengths, "graph_ms"),
        "batches": loop.task.epoch,
        "lengths": lengths,
        "parameters": sum(p.numel() for p in loop.model.parameters()),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "cwy.experiments.nmt.speed", *sys.argv[1:]]),
        **environment(chosen, loop.device),
    }


def _lengths(loop: Loop) -> list[dict[str, Any]]:
    """Return the times of each frequent length, with its number of batches."""
    counts: Counter[int] = Counter()
    examples: dict[int, Batch] = {}
    epoch = loop.task.epoch
    assert epoch is not None
    for number in range(epoch):
        batch = loop.task.batch(number)
        length = batch[0].shape[1]
        counts[length] += 1
        examples.setdefault(length, batch)
    found = []
    for length, count in sorted(counts.items()):
        if count < RARE * epoch:
            continue
        batch = examples[length]
        found.append(
            {
                "length": length,
                "batches": count,
                "plain_ms": _timed(lambda batch=batch: loop.take_step(loop.model, batch)),
                "graph_ms": _captured(loop, batch),
            }
        )
    return found


def _captured(loop: Loop, batch: Batch) -> float | None:
    """Return the milliseconds of a captured step, or None if it cannot be captured."""
    try:
        call = CapturedCall(lambda *parts: loop.take_step(loop.model, parts), batch)
    except CaptureError as error:
        print(f"no CUDA graph: {error}")
        loop.optimizer.zero_grad()
        return None
    return _timed(call.replay)


def _timed(call: Callable[[], object]) -> float:
    """Return the milliseconds of a call, the median of several means."""
    for _ in range(3):
        call()
    count = max(1, math.ceil(SECONDS / _seconds(call, 1)))
    return median(_seconds(call, count) for _ in range(REPEATS)) * 1e3


def _seconds(call: Callable[[], object], count: int) -> float:
    """Return the mean seconds of some calls."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def _mean(lengths: list[dict[str, Any]], key: str) -> float | None:
    """Return the mean over the batches of an epoch, or None if a length has no time."""
    if any(one[key] is None for one in lengths):
        return None
    total = sum(one["batches"] * one[key] for one in lengths)
    return total / sum(one["batches"] for one in lengths)


def main() -> None:
    """Time networks and write their record."""
    parser = argparse.ArgumentParser(
        prog="python -m cwy.experiments.nmt.speed",
        description="Time training steps of translation on a GPU.",
    )
    parser.add_argument("file", type=Path, help="for the records. Those of other networks stay")
    parser.add_argument(
        "--networks",
        type=named_networks,
        default=TIMED,
        help="names or groups, as in python -m cwy.experiments.nmt.sweep. "
        "By default those of the page of results",
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default=PRECISIONS[0],
        help=f"by default {PRECISIONS[0]}",
    )
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU.")
    try:
        # It finds out whether the file can be read and written.
        merge(given.file, [])
    except Damaged as damage:
        parser.error(str(damage))
    except OSError as error:
        parser.error(f"cannot write {given.file}: {error.strerror}.")
    networks = dict.fromkeys(network for group in given.networks.values() for network in group)
    failures = 0
    for network in networks:
        try:
            found = measure(network, given.precision)
        except Diverged as error:
            print(f"{error}. It has no time.", flush=True)
            failures += 1
            continue
        graph = "no graph"
        if found["graph_ms"] is not None:
            graph = f"{found['graph_ms']:.2f} ms as a graph"
        print(f"{found['run']}: {found['plain_ms']:.2f} ms in plain calls, {graph}", flush=True)
        merge(given.file, [found])
        torch.cuda.empty_cache()
    if failures:
        sys.exit(f"networks without a time: {failures}. The lines above state why.")


if __name__ == "__main__":
    main()
