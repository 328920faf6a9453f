"""``cwy bench rnn``: every backend is listed or timed, and the memory modes save memory."""

import pytest
import torch

from cwy.bench.harness.measure import Plan
from cwy.bench.harness.measure import run as measure
from cwy.bench.harness.timing import Effort
from cwy.bench.output.rows import context, read
from cwy.bench.suites import rnn
from tests.helpers.bench import bench
from tests.helpers.errors import assert_one_line

pytestmark = pytest.mark.slow

SIZES = {"19x3x10": (19, 3, 10), "24x4x3x8": (24, 4, 3, 8)}


def test_every_backend_and_peer_is_timed_or_says_why_not(tmp_path):
    done = bench(
        "--sizes", ",".join(SIZES), "--nonlinearity", "abs,modrelu,relu", cwd=tmp_path, name="rnn"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "µs a" in done.stdout
    rows = {(row.size, row.entry): row for row in read(tmp_path / "bench" / "rnn.csv")}
    expected = {
        (text, e.name)
        for text, size in SIZES.items()
        for e in rnn.entries(size)
        if e.nonlinearity in ("", "abs", "modrelu", "relu")
    }
    assert rows.keys() == expected
    for size in SIZES:
        assert {"nn.RNN", "nn.GRU", "nn.LSTM"} <= {entry for at, entry in rows if at == size}
        for backend in rnn.rollout_backends():
            for f in ("abs", "modrelu", "relu"):
                assert (size, f"{backend.name}, {f}") in rows
    for (_, entry), row in rows.items():
        reduced = entry.endswith(rnn.REDUCED)
        unfit = entry.startswith(("cuda", "cudnn")) or reduced
        assert row.status == ("skipped" if unfit else "ok"), (entry, row.reason)
        assert (("only on a GPU" if reduced else "x is on cpu") in row.reason) == unfit
        # The products alone are those of forward and backward in one.
        if entry == "products":
            assert row.seconds("forward") > 0
        elif not unfit:
            assert row.seconds("both") > 0
            assert row.gradient_error < 1e-5


def test_an_unknown_nonlinearity_is_one_line(tmp_path):
    done = bench("--nonlinearity", "reul", cwd=tmp_path, name="rnn")
    assert_one_line(done, "Did you mean 'relu'")


def test_reversible_and_checkpoint_take_less_than_a_fifth_of_the_memory():
    rows = []
    plan = Plan(
        bench="rnn",
        entries=rnn.entries,
        sizes=[(32, 4, 2000)],
        wanted=lambda entry: entry.name.startswith("abs, last"),
        dtype=torch.float32,
        context=context(torch.device("cpu"), seed=0),
        effort=Effort(repeats=3, shortest=1e-5, budget=0.1, limit=60.0),
    )
    measure(plan, rows)
    assert {row.status for row in rows} == {"ok"}, [row.reason for row in rows]
    memory = {row.entry.split(", ")[-1]: row.memory for row in rows}
    assert 0 < max(memory["reversible"], memory["checkpoint"]) < memory["store"] / 5, memory
