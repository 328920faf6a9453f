"""The harness: what is wrong gets no time, what is slow or missing is listed, and all samples are taken in turn."""

import os
import subprocess
import time
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cwy
from cwy.bench import figure1c, figure2, matrix, stiefel, table1
from cwy.bench.entry import Case, Entry, gaussian
from cwy.bench.graph import record
from cwy.bench.memory import bounded, peak
from cwy.bench.peers import INSTALL
from cwy.bench.rows import Context, context
from cwy.bench.run import run
from cwy.bench.timing import Effort, Timer, in_turn
from cwy.info import commit

CPU = torch.device("cpu")
SHORT = Effort(repeats=3, shortest=1e-5, budget=0.1, limit=60.0)


def entry(name, call, truth=None, complex=False, **given):
    def make(dtype, device):
        v = gaussian(6, 4, dtype=dtype.to_complex() if complex else dtype, device=device)
        return Case(call, (v,), truth or call, cwy.orthogonality_error)

    return Entry(name, f"{name} of 6 x 4", make, **given)


def measure(*entries, sizes=((6, 4),), effort=SHORT):
    rows = []
    run("trial", lambda size: entries, sizes, lambda one: True, torch.float32, context(CPU, seed=7), effort, rows)
    return rows


def of_unit_vectors(u):
    s = 0.5 * torch.eye(4, dtype=u.dtype) + (u.mT @ u).triu(1)
    return torch.eye(6, 4, dtype=u.dtype) - u @ torch.linalg.solve_triangular(s, u[:4].mT, upper=True)


class WithoutProjection(torch.autograd.Function):
    """T-CWY whose backward pass forgets the normalisation's projection: as wrong in float64 as in float32."""

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
    "gradient in float32": entry("gradient in float32", WithoutProjection.apply, cwy.ops.tcwy_matrix),
    "gradient, complex": entry("gradient, complex", Conjugated.apply, complex=True),
    "result": entry("result", lambda v: cwy.ops.tcwy_matrix(v + 0.01), cwy.ops.tcwy_matrix),
    "orthogonality": entry("orthogonality", lambda v: v @ torch.eye(4, dtype=v.dtype)),
    "shape": entry("shape", cwy.ops.tcwy_matrix, cwy.ops.cwy_matrix, differentiable=False),
    "NotImplementedError": entry("NotImplementedError", cwy.parametrizations.OrthogonalMap(6, 4).matrix),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_gets_no_time(what):
    right = entry(
        "right", cwy.ops.tcwy_matrix, lambda v: cwy.ops.tcwy_matrix(v, backend="reference"), complex="complex" in what
    )
    wrong, fine = measure(WRONG[what], right)
    assert (wrong.entry, wrong.status) == (what, "failed")
    assert what.split(",")[0].split()[0] in wrong.reason
    assert wrong.forward is wrong.both is wrong.memory is None
    assert (fine.status, fine.dtype) == ("ok", "complex64" if "complex" in what else "float32")
    assert 0 < fine.forward_q1 <= fine.forward <= fine.forward_q3
    assert 0 < fine.both_q1 <= fine.both <= fine.both_q3
    assert (fine.forward_repeats, fine.both_repeats) == (3, 3)
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

    first, second = measure(entry("slow", slow), sizes=[(6, 4), (7, 4)], effort=Effort(3, 1e-5, 0.1, limit=0.004))
    assert (first.status, second.status) == ("skipped", "skipped")
    assert "at 6x4" in first.reason
    assert first.reason == second.reason
    assert len(calls) <= 2


def test_what_has_no_backward_pass_is_timed_without():
    (row,) = measure(entry("step", lambda v: cwy.ops.tcwy_matrix(v.detach()), differentiable=False))
    assert (row.status, row.both, row.gradient_error) == ("ok", None, None)
    assert row.forward > 0


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
    assert all(getattr(row, field.name) not in ("", None) for field in fields(Context) if field.name not in ("commit", "load"))
    assert (row.seed, row.threads, row.size, row.bench) == (7, torch.get_num_threads(), "6x4", "trial")
    assert (row.torch, row.cwy) == (torch.__version__, cwy.__version__)
    assert row.package.startswith("hypothesis 6.")


def test_commit_is_that_of_the_source_and_of_no_other_repository(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
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
        assert all(abs(order[:taken].count(i) - taken / len(order) * n) <= 2 for i, n in enumerate(repeats))


def test_peak_memory_is_the_most_held_at_once():
    def call():
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        return second, torch.empty(250)

    assert peak(call, CPU) == 4 * 1500


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("module", "sizes", "recorded", "not_recorded"),
    [
        (matrix, [(64,), (96, 8), (3, 32, 32)], {"matmul", "cwy", "tcwy"}, {"matrix_exp, angle 1"}),
        (stiefel, [(96, 8)], {"tcwy", "rgd-c-qr"}, set()),
        (figure1c, [(64,)], {"cwy", "exponential, no sync", "cayley, no sync"}, {"exponential", "cayley"}),
        (figure2, [(64, 8, 4, 6)], {"cwy, torch", "HR, abs"}, set()),
        (table1, [(64, 8, 4, 6)], {"cwy", "hr", "exprnn"}, set()),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_on_a_gpu_everything_that_is_here_passes_and_is_timed(module, sizes, recorded, not_recorded):
    device, rows = torch.device("cuda"), []
    effort = replace(SHORT, counts=True)
    run("trial", module.entries, sizes, lambda one: True, torch.float32, context(device, 0), effort, rows)
    assert {row.status for row in rows} <= {"ok", "skipped", "missing"}, [row.reason for row in rows]
    timed = [row for row in rows if row.status == "ok"]
    assert all(row.forward > 0 and row.memory > 0 and row.forward_flops > 0 for row in timed)
    assert all((row.both is None) == (row.both_inline is None) for row in timed)
    graphs = {row.entry for row in timed if row.forward_graph}
    assert recorded <= graphs
    assert not_recorded.isdisjoint(graphs)
    lacking = [row.forward_graph is None or (row.both is not None and row.both_graph is None) for row in timed]
    assert [bool(row.reason) for row in timed] == lacking
    assert peak(lambda: torch.empty(1 << 20, device=device), device) == 4 << 20


@pytest.mark.gpu
def test_a_recording_gives_the_same_and_a_failed_one_leaves_no_trace():
    device, stream = torch.device("cuda"), torch.cuda.current_stream()
    v = torch.randn(64, 8, device=device, requires_grad=True)
    z = torch.randn(64, 8, device=device)
    both = lambda: torch.autograd.grad(cwy.ops.tcwy_matrix(v), v, z)
    recorded = record(both, device)
    with torch.no_grad():
        v.copy_(torch.randn(64, 8, device=device))
    recorded.replay()
    torch.testing.assert_close(recorded.result[0], both()[0])
    event = torch.cuda.Event()

    def waits():
        # Not seen by torch's own watch on waiting: the recording itself fails.
        event.record()
        event.synchronize()
        return v.sum()

    for call in (lambda: v.sum().item(), waits):
        assert isinstance(record(call, device), str)
        assert torch.cuda.current_stream() == stream
        assert torch.cuda.get_sync_debug_mode() == 0
        assert torch.randn(4, device=device).isfinite().all()
    assert not isinstance(record(both, device), str)


@pytest.mark.gpu
def test_a_first_call_compiles_and_the_next_process_need_not(monkeypatch, tmp_path):
    from cwy.bench import compile as first
    from cwy.ops import nvrtc

    made = []
    monkeypatch.setenv("CWY_CACHE", str(tmp_path))
    compiled = nvrtc._compile
    monkeypatch.setattr(nvrtc, "_compile", lambda *what: made.append(what) or compiled(*what))
    rows = list(first.measure([(33, 4, 5), (300, 20, 4, 5)], torch.device("cuda")))
    assert [row.size for row in rows] == ["33x4x5", "300x20x4x5"]
    assert made
    assert len(made) == len({repr(what) for what in made}), "from the disk nothing is compiled again"
    assert os.environ["CWY_CACHE"] == str(tmp_path)
    assert not any(tmp_path.iterdir()), "and the user's own cache is left alone"
