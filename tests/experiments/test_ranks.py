"""Two processes by torchrun are one with the joint batch."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from cwy.experiments.engine.distributed import Group
from tests.helpers.cli import cwy, start
from tests.helpers.runs import arguments, resume, rows, train, until, weights

pytestmark = pytest.mark.slow

DOUBLE = ("--precision", "float64")


def close(a, b):
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], atol=1e-6, rtol=0)


@pytest.mark.slow
def test_two_ranks_equal_one_process(tmp_path):
    # Seven examples: four for one rank, three for the other.
    methods, settings = (
        ("cwy", "dtriv", "lstm"),
        {"what": "adding/small", "iterations": 25, "T": 9, "batch_size": 7},
    )
    damaged = tmp_path / "two/small-gru-seed0/config.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{")
    done = cwy(
        *arguments(tmp_path / "two", "--method", ",".join(("gru", *methods)), *DOUBLE, **settings),
        ranks=2,
    )
    assert done.returncode == 1, done.stderr
    assert f"small-gru-seed0 failed: {damaged} is damaged" in done.stdout
    assert train(tmp_path / "one", methods, precision="float64", **settings)[0] == 0
    for method in methods:
        one, two = (tmp_path / ranks / f"small-{method}-seed0" for ranks in ("one", "two"))
        close(weights(one), weights(two))
        for a, b in zip(rows(one), rows(two), strict=True):
            assert (a["step"], a["split"]) == (b["step"], b["split"])
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-9)
            assert a["accuracy"] == pytest.approx(b["accuracy"], abs=1e-9)


@pytest.mark.slow
def test_ranks_stop_at_the_same_step_and_one_process_goes_on(tmp_path):
    run = tmp_path / "run"
    process = start(*arguments(run, *DOUBLE), ranks=2)
    until(process, run, 30)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = [
        int(child)
        for child in children
        if b"cwy\0train" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGTERM)
    _, error = process.communicate(timeout=30)
    assert process.returncode != 0
    stopped = set(re.findall(r"stopped at step (\d+), and saved", error))
    assert len(stopped) == 1
    assert (run / "checkpoints" / f"step-{int(stopped.pop()):08d}.pt").exists()
    assert resume(run)[0] == 0
    assert train(tmp_path / "one", precision="float64")[0] == 0
    close(weights(run), weights(tmp_path / "one"))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_shares_make_up_the_batch(size, monkeypatch):
    batch, values, found = (torch.arange(5), torch.arange(5.0)), torch.arange(5.0), []
    monkeypatch.setenv("WORLD_SIZE", str(size))
    mean = 0.0
    for rank in range(size):
        monkeypatch.setenv("RANK", str(rank))
        (rows, _), weight = Group("cpu").share(batch)
        assert len(rows)
        found += rows.tolist() if weight else []
        mean += values[rows].mean() * weight / size
    assert sorted(found) == list(range(5))
    assert mean == pytest.approx(values.mean())
