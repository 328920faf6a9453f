"""The benchmark of JAX: timed inside JAX, within a budget of compilation."""

from functools import partial

import numpy as np
import pytest
import torch

from cwy.bench import cli
from cwy.bench.harness.measure import Plan, run
from cwy.bench.harness.timing import Effort, Timer
from cwy.bench.output.rows import context
from cwy.bench.suites import jax as suite

jax = pytest.importorskip("jax")
CPU = torch.device("cpu")
SHORT = Effort(repeats=3, shortest=1e-5, budget=0.1, limit=60.0)


def measured(*sizes):
    found = []
    where = context(CPU, 0)
    run(Plan("jax", suite.entries, sizes, lambda one: True, torch.float32, where, SHORT), found)
    return {(one.entry, one.size): one for one in found}


@pytest.mark.slow
def test_every_entry_passes_its_check():
    found = measured((8,), (9, 4), (5, 2, 6))
    assert len(found) == 15
    for (name, _), one in found.items():
        assert one.status == "ok", (name, one.reason)
        assert list(one.times) == ["forward", "both"]
        assert one.memory > 0


def test_an_entry_that_compiles_too_long_is_skipped(monkeypatch):
    monkeypatch.setattr(suite, "COMPILE_SECONDS", 0.0)
    found = measured((8,))
    reasons = {name: one.reason for (name, _), one in found.items() if one.status == "skipped"}
    assert {"cwy jax", "expm"} <= set(reasons)
    assert set(reasons.values()) == {"compiling it took more than 0 s"}
    assert found["cwy torch", "8"].status == "ok"


def test_one_program_repeats_both_passes():
    """Its inputs stay the same, and the compiler keeps the gradient in the loop."""
    made = partial(jax.numpy.matmul, precision="highest")
    shape = suite._Shape(((7, 5), (5, 5)), (7, 5), 3)
    programs = suite._Programs(made, shape, jax.devices("cpu")[0])
    inputs = torch.randn(7, 5), torch.randn(5, 5)
    passes = suite._Passes(programs, inputs)
    passes.receive(torch.ones(7, 5))
    for left, right in zip(passes.tensors(passes.repeated()), inputs, strict=True):
        np.testing.assert_array_equal(left, right)
    # The cost of a loop is that of its body once.
    assert programs.repeated.cost_analysis()["flops"] >= 2 * (2 * 7 * 5 * 5)


def test_flags_of_xla_are_in_the_command(monkeypatch):
    monkeypatch.setattr("sys.argv", ["cwy", "bench", "jax"])
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert cli._command_line() == "cwy bench jax"
    monkeypatch.setenv("XLA_FLAGS", "--one=1 --two")
    assert cli._command_line() == "XLA_FLAGS='--one=1 --two' cwy bench jax"
    monkeypatch.setattr("sys.argv", ["cwy", "bench", "matrix"])
    assert cli._command_line() == "cwy bench matrix"


def test_a_row_of_calls_waits_once_and_counts_repetitions():
    waited = []
    timer = Timer(lambda: len(waited), CPU, number=4, wait=waited.append, inner=1)
    timer.sample()
    assert waited == [0]
    inner = Timer(lambda: 1, CPU, number=4, wait=waited.append, inner=1000)
    inner.sample()
    assert inner.samples[0] < 1e-5
