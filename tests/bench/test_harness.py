"""The harness: wrong entries get no time, slow or missing ones are listed, samples take turns."""

import os
import subprocess
import time
from dataclasses import fields, replace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cwy
from cwy._provenance import commit
from cwy.bench.harness.entry import Case, Entry, gaussian
from cwy.bench.harness.machine import bounded, idle_cores, peak
from cwy.bench.harness.measure import Plan, run
from cwy.bench.harness.timing import Effort, Timer, in_turn
from cwy.bench.output.rows import Context, context
from cwy.bench.suites import INSTALL, load

CPU = torch.device("cpu")
SHORT = Effort(repeats=3, shortest=1e-5, budget=0.1, limit=60.0)


def entry(name, call, truth=None, complex=False, **given):
    def make(dtype, device):
        v = gaussian(6, 4, dtype=dtype.to_complex() if complex else dtype, device=device)
        return Case(call, (v,), truth or call, cwy.orthogonality_error)

    return Entry(name, f"{name} of 6 x 4", make, **given)


def measure(*entries, sizes=((6, 4),), effort=SHORT):
    return measured(lambda size: entries, sizes, context(CPU, 7, "a command"), effort)


def measured(entries, sizes, where, effort):
    rows = []
    run(Plan("trial", entries, sizes, lambda one: True, torch.float32, where, effort), rows)
    return rows


def of_unit_vectors(u):
    s = 0.5 * torch.eye(4, dtype=u.dtype) + (u.mT @ u).triu(1)
    return torch.eye(6, 4, dtype=u.dtype) - u @ torch.linalg.solve_triangular(
        s, u[:4].mT, upper=True
    )


class WithoutProjection(torch.autograd.Function):
    """T-CWY whose backward pass forgets the normalization's projection, in float64 as well."""

    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return of_unit_vectors(v / v.norm(dim=0))

    @staticmethod
    def backward(ctx, z):
        (v,) = ctx.saved_tensors
        return torch.func.vjp(of_unit_vectors, v / v.norm(dim=0))[1](z)[0] / v.norm(dim=0)


class Conjugated(torch.autograd.Function):
    """Complex T-CWY that returns the conjugate of its gradient."""

    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return cwy.ops.tcwy_matrix(v)

    @staticmethod
    def backward(ctx, z):
        return torch.func.vjp(cwy.ops.tcwy_matrix, *ctx.saved_tensors)[1](z)[0].conj()


WRONG = {
    "gradient": entry("gradient", WithoutProjection.apply),
    "gradient in float32": entry(
        "gradient in float32", WithoutProjection.apply, cwy.ops.tcwy_matrix
    ),
    "gradient, complex": entry("gradient, complex", Conjugated.apply, complex=True),
    "result": entry("result", lambda v: cwy.ops.tcwy_matrix(v + 0.01), cwy.ops.tcwy_matrix),
    "orthogonality": entry("orthogonality", lambda v: v @ torch.eye(4, dtype=v.dtype)),
    "shape": entry("shape", cwy.ops.tcwy_matrix, cwy.ops.cwy_matrix, differentiable=False),
    "NotImplementedError": entry(
        "NotImplementedError", cwy.parametrizations.OrthogonalMap(6, 4).matrix
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_gets_no_time(what):
    right = entry(
        "right",
        cwy.ops.tcwy_matrix,
        lambda v: cwy.ops.tcwy_matrix(v, backend="reference"),
        complex="complex" in what,
    )
    wrong, fine = measure(WRONG[what], right)
    assert (wrong.entry, wrong.status) == (what, "failed")
    assert what.split(",")[0].split()[0] in wrong.reason
    assert wrong.times == {}
    assert wrong.memory is None
    assert (fine.status, fine.dtype) == ("ok", "complex64" if "complex" in what else "float32")
    assert fine.times.keys() == {"forward", "both"}
    for found in fine.times.values():
        assert 0 < found.q1 <= found.median <= found.q3
        assert found.repeats == 3
    assert 0 < max(fine.error, fine.gradient_error, fine.orthogonality) < 1e-5


def test_a_missing_package_is_listed_with_its_install_command():
    (row,) = measure(entry("absent", cwy.ops.tcwy_matrix, package="no_such_package"))
    assert row.status == "missing"
    assert row.reason == f"no_such_package is not installed: {INSTALL}"
    assert INSTALL == 'pip install "cwy[peers]"'


def test_a_slow_entry_is_skipped_and_not_tried_again():
    calls = []

    def slow(v):
        calls.append(v)
        time.sleep(0.02)
        return cwy.ops.tcwy_matrix(v)

    first, second = measure(
        entry("slow", slow), sizes=[(6, 4), (7, 4)], effort=Effort(3, 1e-5, 0.1, limit=0.004)
    )
    assert (first.status, second.status) == ("skipped", "skipped")
    assert "at 6x4" in first.reason
    assert first.reason == second.reason
    assert len(calls) <= 2


def test_what_has_no_backward_pass_is_timed_without():
    (row,) = measure(entry("step", lambda v: cwy.ops.tcwy_matrix(v.detach()), differentiable=False))
    assert (row.status, row.seconds("both"), row.gradient_error) == ("ok", None, None)
    assert row.ranked == row.seconds("forward") > 0


def test_too_large_is_a_row_not_the_end_of_the_process():
    giant = entry("giant", lambda v: v.new_ones(1 << 45))
    row, fine = measure(giant, entry("right", cwy.ops.tcwy_matrix))
    assert row.status == "failed"
    assert row.reason.startswith("out of memory on the CPU, asking for 1.41e+08 MB (")
    assert fine.status == "ok"
    with bounded():
        assert torch.ones(1000).sum() == 1000


def test_rows_carry_what_they_depend_on():
    (row,) = measure(entry("right", cwy.ops.tcwy_matrix, package="hypothesis"))
    where = row.context
    known = [field.name for field in fields(Context) if field.name != "commit"]
    assert all(getattr(where, name) not in ("", None) for name in known)
    assert (where.seed, where.threads, where.command) == (7, torch.get_num_threads(), "a command")
    assert (row.size, row.bench) == ("6x4", "trial")
    assert (where.torch, where.cwy) == (torch.__version__, cwy.__version__)
    assert row.package.startswith("hypothesis 6.")


def test_commit_is_that_of_the_source_and_of_no_other_repository(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        done = subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init")
    source = tmp_path / "cwy"
    source.mkdir()
    (source / "__init__.py").touch()
    assert commit(source) == ""
    git("add", ".")
    git("commit", "-m", "first")
    assert commit(source) == git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "elsewhere").touch()
    assert "+dirty" not in commit(source)
    (source / "new.py").touch()
    assert commit(source).endswith("+dirty")


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_samples_are_taken_in_turn(repeats):
    order = []
    timers = [Timer(lambda i=i: order.append(i), CPU, repeats=n) for i, n in enumerate(repeats)]
    assert list(in_turn(timers)) == list(range(1, sum(repeats) + 1))
    assert [len(timer.samples) for timer in timers] == repeats
    # At any moment every timer has had its share, to within the round that is under way.
    for taken in range(1, len(order) + 1):
        assert all(
            abs(order[:taken].count(i) - taken / len(order) * n) <= 2 for i, n in enumerate(repeats)
        )


def test_peak_memory_is_the_most_held_at_once():
    def call():
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        return second, torch.empty(250)

    assert peak(call, CPU) == 4 * 1500


def test_idle_cores_are_at_most_those_this_process_may_use():
    assert 0 <= idle_cores(0.05) <= psutil.cpu_count()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("bench", "sizes", "recorded", "not_recorded"),
    [
        (
            "matrix",
            [(64,), (96, 8), (3, 32, 32)],
            {"matmul", "cwy", "tcwy"},
            {"matrix_exp, angle 1"},
        ),
        ("stiefel", [(96, 8)], {"tcwy", "rgd-c-qr"}, set()),
        (
            "figure1c",
            [(64,)],
            {"cwy", "exponential, no sync", "cayley, no sync"},
            {"exponential", "cayley"},
        ),
        ("figure2", [(64, 8, 4, 6)], {"cwy, torch", "HR, abs"}, set()),
        ("table1", [(64, 8, 4, 6)], {"cwy", "hr", "exprnn"}, set()),
    ],
)
def test_on_a_gpu_all_that_is_here_passes_and_is_timed(bench, sizes, recorded, not_recorded):
    device = torch.device("cuda")
    effort = replace(SHORT, counts=True)
    rows = measured(load(bench).entries, sizes, context(device, 0), effort)
    assert {row.status for row in rows} <= {"ok", "skipped", "missing"}, [
        row.reason for row in rows
    ]
    timed = [row for row in rows if row.status == "ok"]
    for row in timed:
        assert row.memory > 0
        assert row.seconds("forward") > 0
        assert row.flops("forward") > 0
        assert ("both" in row.times) == ("both_inline" in row.times)
        # Each plain time has one as a graph, or a reason why not.
        wanted = {f"{kind}_graph" for kind in ("forward", "both") if kind in row.times}
        assert row.times.keys() & wanted == wanted - row.ungraphed.keys()
        assert all(row.ungraphed.values())
    graphs = {row.entry for row in timed if "forward_graph" in row.times}
    assert recorded <= graphs
    assert not_recorded.isdisjoint(graphs)
    assert peak(lambda: torch.empty(1 << 20, device=device), device) == 4 << 20


def test_a_training_step_is_timed_for_every_kind_of_weight():
    entries = load("model").entries
    sizes = [(8, 2, 4), (8, 3, 2, 4), (8, 1, 4), (8, 8, 3, 2, 5)]
    rows = measured(entries, sizes, context(torch.device("cpu"), 0), SHORT)
    assert {row.status for row in rows} <= {"ok", "skipped", "missing"}, [
        row.reason for row in rows
    ]
    timed = {(row.size, row.entry) for row in rows if row.status == "ok"}
    for size in ("8x2x4", "8x3x2x4"):
        for kind in ("free", "cwy", "cwy together"):
            assert {(size, kind), (size, f"{kind} (autocast)")} <= timed
    assert ("8x2x4", "torch cayley") in timed
    assert ("8x1x4", "cwy") in timed
    recurrences = {entry for size, entry in timed if size == "8x8x3x2x5"}
    assert recurrences == {"free", "free (autocast)", "cwy", "cwy (autocast)"}


@pytest.mark.gpu
def test_a_first_call_compiles_and_the_next_process_need_not(monkeypatch, tmp_path):
    from cwy.bench.suites import compile as first
    from cwy.ops import _nvrtc

    made = []
    monkeypatch.setenv("CWY_CACHE", str(tmp_path))
    compiled = _nvrtc.compiler.compile_source
    monkeypatch.setattr(
        _nvrtc.compiler, "compile_source", lambda *what: made.append(what) or compiled(*what)
    )
    where = context(torch.device("cuda"), 0)
    rows = list(first.measure([(33, 4, 5), (300, 20, 4, 5)], where))
    assert [row.size for row in rows] == ["33x4x5", "300x20x4x5"]
    assert all(tuple(row.times) == first.KINDS for row in rows)
    assert made
    assert len(made) == len({repr(what) for what in made}), (
        "from the disk nothing is compiled again"
    )
    assert os.environ["CWY_CACHE"] == str(tmp_path)
    assert not any(tmp_path.iterdir()), "and the user's own cache is left alone"
