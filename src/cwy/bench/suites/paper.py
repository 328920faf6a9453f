"""The paper's own comparisons: Figures 1c and 2, and Table 1.

Figure 1c: the time to compute an orthogonal N x N matrix of a random argument, by CWY, the
exponential and the Cayley map. As in the paper, reflection vectors have standard normal entries,
and skew-symmetric arguments are X - Xᵀ with such an X.

Figure 2: a recurrence through L reflections one after another (HR), and through all of them at once
(CWY). It starts from the reflection vectors and has the nonlinearity of the paper's translation,
abs. CWY computes its factors once for all steps. The time includes that.

Table 1: T steps of a recurrence of N units by every square method, from its free parameters.
h_t = Q h_{t-1} + x_t for a batch of B. The nonlinearity changes no cost, and without one the states
stay smooth. L is the number of reflections or layers of the methods that have one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log2

import torch
from torch import Tensor

from ... import init, ops
from ...api import orthogonality_error
from ...manifolds import stiefel
from ...ops import dispatch
from ...ops._linalg import double
from ...ops.recurrence.factors import factors_are_cheaper
from ...ops.recurrence.spec import Request
from ...ops.skew import cayley
from ...ops.skew.capturable import exponential
from ...parametrizations import OrthogonalMap
from ...registry import Method
from ..harness.entry import Case, Entry, gaussian
from . import Size, Suite, matrix
from .methods import Usage, counted, listed, multiplies_without_q, serving, weight_dtype
from .rnn import draw_states, lengths, off_kinks, one_at_a_time, rollout, rollout_backends

Map = Callable[[Tensor], Tensor]


MATRICES = ("cwy", "cwy L=N/4", "cwy L=128")
"""The entries of ``matrix`` that Figure 1c has, too."""


def _figure_1c(size: Size) -> list[Entry]:
    """List CWY and its rivals.

    CWY is there as it is and as the paper's code had it. Its rivals are there as torch has them and
    as this library does, without synchronization, so that a CUDA graph can hold them. One product,
    and Q of fewer reflections, give the scale.
    """
    (n,) = size
    formed = matrix.entries(size)
    solved = "I - U S⁻¹ Uᵀ by torch.linalg.solve_triangular, with autograd"
    solve = "torch.linalg.solve(I + A/2, I - A/2) with A = X - Xᵀ"
    return [
        *(entry for entry in formed if entry.group == "floor" or entry.name in MATRICES),
        _of_gaussian(n, "cwy, one solve", solved, _one_solve),
        _of_gaussian(n, "exponential", "torch.matrix_exp(X - Xᵀ)", _of_skew(torch.matrix_exp)),
        _of_gaussian(n, "cayley", solve, _of_skew(_cayley_by_solve)),
        _without_sync(n, "exponential", "exprnn", exponential, torch.matrix_exp),
        _without_sync(n, "cayley", "scornn", cayley, cayley),
    ]


def _of_skew(call: Map) -> Map:
    return lambda x: call(x - x.mT)


def _of_gaussian(n: int, name: str, about: str, call: Map) -> Entry:
    def make(dtype: torch.dtype, device: torch.device) -> Case:
        x = gaussian(n, n, dtype=dtype, device=device)
        return Case(call, (x,), call, orthogonality_error)

    return Entry(name, about, make)


_OURS = {"exponential": "cwy.ops.skew.capturable.exponential", "cayley": "cwy.ops.skew.cayley"}


def _without_sync(n: int, rival: str, method: str, call: Map, truth: Map) -> Entry:
    def make(dtype: torch.dtype, device: torch.device) -> Case:
        x = gaussian(n, n, dtype=dtype, device=device)
        return Case(_of_skew(call), (x,), _of_skew(truth), orthogonality_error)

    about = f"{_OURS[rival]}(X - Xᵀ), which does not synchronize with the host"
    return Entry(f"{rival}, no sync", about, make, group="ours", method=method, package="cwy")


def _cayley_by_solve(a: Tensor) -> Tensor:
    half = a / 2
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return torch.linalg.solve(eye + half, eye - half)


def _one_solve(v: Tensor) -> Tensor:
    u = v / v.norm(dim=0)
    eye = torch.eye(v.shape[-1], dtype=v.dtype, device=v.device)
    s = 0.5 * eye + (u.mT @ u).triu(1)
    return eye - u @ torch.linalg.solve_triangular(s, u.mT, upper=True)


FIGURE_1C = Suite(_figure_1c, lambda size, device: "cwy")


F = "abs"
"""The nonlinearity of the paper's translation."""


def _figure_2(size: Size) -> list[Entry]:
    """List HR, CWY by each backend, and CWY in a loop over its factors, as in the paper."""
    served = [one for one in rollout_backends() if one.name in ("cuda", "torch")]
    at_once = [_at_once(size, backend) for backend in served]
    return [*at_once, _loop(size), one_at_a_time(size, F)]


def _figure_2_baseline(size: Size, device: str) -> str:
    if device == "cuda":
        return "cwy, cuda"
    return "cwy, torch"


def _at_once(size: Size, backend: dispatch.Backend) -> Entry:
    n, count, batch, steps = size

    def call(h0: Tensor, served: str, x: Tensor, v: Tensor, b: Tensor) -> Tensor:
        return rollout(x, h0, ops.wy_factors(v), b, F, served)

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        inputs, h0 = _reflections(size, dtype, device)
        truth = partial(call, double(h0), "torch")
        return Case(partial(call, h0, backend.name), inputs, truth, None)

    def why_not(dtype: torch.dtype, device: torch.device) -> str | None:
        return backend.why_not(Request(n, batch, steps, dtype, device.type, F, count))

    return Entry(
        f"cwy, {backend.name}",
        f"ops.rollout(x, h0, ops.wy_factors(v), b, {F!r}, backend={backend.name!r})",
        make,
        group="ours",
        method="cwy",
        package="cwy",
        why_not=why_not,
    )


def _loop(size: Size) -> Entry:
    def call(h: Tensor, x: Tensor, v: Tensor, b: Tensor) -> Tensor:
        u, t = ops.wy_factors(v)
        states = []
        for xt in x:
            h = (h - ((h @ u) @ t.mT) @ u.mT + xt + b).abs()
            states.append(h)
        return torch.stack(states)

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        inputs, h0 = _reflections(size, dtype, device)
        return Case(partial(call, h0), inputs, partial(call, double(h0)), None)

    about = "u, t = ops.wy_factors(v), then a loop of three products per step, by autograd"
    return Entry("cwy, eager loop", about, make)


def _reflections(
    size: Size, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Return ``(x, v, b)``, and h0."""
    n, count, _, _ = size
    v = gaussian(n, count, dtype=dtype, device=device)
    x, h0, b = draw_states(lengths(size), F, dtype, device)
    x = off_kinks(F, x, h0, [ops.cwy_matrix(double(v))], b)
    return (x, v, b), h0


FIGURE_2 = Suite(_figure_2, _figure_2_baseline)


def _table_1(size: Size) -> list[Entry]:
    """List a free transition as the floor, and every method of the table as it is cheapest.

    That is with Q formed, in low-rank form, or without forming Q.
    """
    n, count, _, _ = size
    named = _serial_times(size)
    ours = [
        _method(method, size, counted(method, count))
        for name, method in serving(n, n).items()
        if name in named
    ]
    return [_free(size), *ours, _moved(size)]


def _serial_times(size: Size) -> dict[str, tuple[str, float]]:
    """Return the paper's serial times of a batch, which have no constants."""
    n, count, batch, steps = size
    t = batch * steps
    return {
        "rnn": ("TN²", t * n**2),
        "urnn": ("TN log N", t * n * log2(n)),
        "scornn": ("TN² + N³", t * n**2 + n**3),
        "rgd-c-c": ("TN² + N³", t * n**2 + n**3),
        "exprnn": ("TN² + N³", t * n**2 + n**3),
        "eurnn": ("TLN", t * count * n),
        "hr": ("TLN", t * count * n),
        "cwy": ("TLN + L²N + L³", t * count * n + count**2 * n + count**3),
    }


def _method(method: Method, size: Size, options: dict[str, int]) -> Entry:
    n, _, batch, steps = size
    how = "Q formed"
    use = _formed
    if method.name == "cwy":
        how = "in low-rank form, or with Q formed if that is faster"
        use = _factored
    elif multiplies_without_q(method):
        how = "each step multiply(free, h)"
        use = _step_by_step
    usage = Usage(method, n, n, use, options=options)

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        weight = weight_dtype(method, n, n, dtype, **options) or dtype
        x = gaussian(steps, batch, n, dtype=weight, device=device)
        return usage.case(weight, device, x)

    about = f"cwy.METHODS[{method.name!r}]{listed(options)}: {how}"
    return Entry(method.name, about, make, group="ours", method=method.name, package="cwy")


def _free(size: Size) -> Entry:
    n, _, batch, steps = size

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        q = init.haar(n, dtype=dtype, device=device)
        x = gaussian(steps, batch, n, dtype=dtype, device=device)
        return Case(_states, (q, x), _states, None)

    return Entry("rnn", "ops.rollout by a free transition", make, group="floor")


def _moved(size: Size) -> Entry:
    """Time a step on the manifold, then the rollout by what it moved.

    On the manifold the transition is there already. Nothing is differentiated through the step:
    what it moved is a leaf, and so is the zero in its place here.
    """
    n, _, batch, steps = size

    def step(q: Tensor, g: Tensor, zero: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            moved = stiefel.cayley(q, stiefel.gradient(q, g), -0.1)
        return _states(moved + zero, x)

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        like = {"dtype": dtype, "device": device}
        q = init.haar(n, **like)
        g = gaussian(n, n, std=0.5 * n**-0.5, **like)
        zero = torch.zeros(n, n, **like)
        x = gaussian(steps, batch, n, **like)
        truth = partial(step, double(q), double(g))
        return Case(partial(step, q, g), (zero, x), truth, None)

    about = "a step of a given gradient on the manifold, then ops.rollout by what it moved"
    return Entry("rgd-c-c", about, make, group="ours", method="rgd-c-c", package="cwy")


def _formed(chart: OrthogonalMap) -> Callable[..., Tensor]:
    def call(*given: Tensor) -> Tensor:
        *free, x = given
        return _states(chart(*free), x)

    return call


def _factored(chart: OrthogonalMap) -> Callable[..., Tensor]:
    """Choose between Q and its factors as OrthogonalRNN does."""

    def call(v: Tensor, x: Tensor) -> Tensor:
        steps, batch, n = x.shape
        count = v.shape[-1]
        where = x.device
        if factors_are_cheaper(n, count, steps * batch, where.type, x.dtype, where.index):
            return _states(ops.wy_factors(v), x)
        return _states(chart(v), x)

    return call


def _step_by_step(chart: OrthogonalMap) -> Callable[..., Tensor]:
    """Multiply each state without forming Q."""

    def call(*given: Tensor) -> Tensor:
        *free, x = given
        h = torch.zeros_like(x[0])
        states = []
        for xt in x:
            h = chart.multiply(*free, h) + xt
            states.append(h)
        return torch.stack(states)

    return call


def _states(transition: Tensor | ops.WY, x: Tensor) -> Tensor:
    return rollout(x, torch.zeros_like(x[0]), transition, None, "identity", "auto")


TABLE_1 = Suite(_table_1, lambda size, device: "cwy", _serial_times)
