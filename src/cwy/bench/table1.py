"""Table 1: T steps of a recurrence of N units by every square method, from its free parameters.

h_t = Q h_{t-1} + x_t for a batch of B: which nonlinearity follows changes no cost, and none keeps the states smooth. L is the
number of reflections or layers of the methods that have one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log2

import torch
from torch import Tensor

from .. import init, ops
from ..manifolds import stiefel
from ..ops.recurrence.functions import factors_are_cheaper
from ..parametrizations import OrthogonalMap
from ..registry import Method
from ..testing import double
from .entry import Case, Entry, gaussian
from .ours import case, multiplies_unformed, serving, takes, weight_dtype
from .sizes import Size


def baseline(size: Size, device: str) -> str:
    return "cwy"


def paper(size: Size) -> dict[str, tuple[str, float]]:
    """The paper's serial time, which has no constants, of a batch: as a formula, and as a number."""
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


def entries(size: Size) -> list[Entry]:
    """A free transition as the floor, and every method of the table as it is cheapest: Q formed, by factors, or unformed."""
    n, count, batch, steps = size
    found = [_free(n, batch, steps)]
    for name, method in serving(n, n).items():
        if name in paper(size):
            options = {option: count for option in ("reflections", "layers") if takes(method, option)}
            found.append(_method(method, size, options))
    return [*found, _moved(n, batch, steps)]


def _method(method: Method, size: Size, options: dict) -> Entry:
    n, _, batch, steps = size
    how, use = ("by factors, or Q formed where that is faster", _factored) if method.name == "cwy" else ("Q formed", _formed)
    if method.name != "cwy" and multiplies_unformed(method):
        how, use = "each step multiply(free, h)", _unformed

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        weight = weight_dtype(method, n, n, dtype, **options) or dtype
        x = gaussian(steps, batch, n, dtype=weight, device=device)
        return case(method, n, n, use, None, weight, device, x, **options)

    about = f"cwy.METHODS[{method.name!r}]{''.join(f', {key}={value}' for key, value in options.items())}: {how}"
    return Entry(method.name, about, make, group="ours", method=method.name, package="cwy")


def _free(n: int, batch: int, steps: int) -> Entry:
    def make(dtype: torch.dtype, device: torch.device) -> Case:
        q, x = init.haar(n, dtype=dtype, device=device), gaussian(steps, batch, n, dtype=dtype, device=device)
        return Case(_states, (q, x), _states, None)

    return Entry("rnn", "ops.rollout by a free transition", make, group="floor")


def _moved(n: int, batch: int, steps: int) -> Entry:
    """On the manifold the transition is there already; what it costs is the step that moves it, before the rollout.

    Nothing is differentiated through the step: what it moved is a leaf, and so is the zero that stands for it here.
    """

    def step(q: Tensor, g: Tensor, zero: Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            moved = stiefel.cayley(q, stiefel.gradient(q, g), -0.1)
        return _states(moved + zero, x)

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        like = {"dtype": dtype, "device": device}
        q, g = init.haar(n, **like), gaussian(n, n, std=0.5 * n**-0.5, **like)
        inputs = torch.zeros(n, n, **like), gaussian(steps, batch, n, **like)
        return Case(partial(step, q, g), inputs, partial(step, double(q), double(g)), None)

    about = "a step of a given gradient on the manifold, then ops.rollout by what it moved"
    return Entry("rgd-c-c", about, make, group="ours", method="rgd-c-c", package="cwy")


def _formed(chart: OrthogonalMap) -> Callable[..., Tensor]:
    return lambda *given: _states(chart(*given[:-1]), given[-1])


def _factored(chart: OrthogonalMap) -> Callable[..., Tensor]:
    """As OrthogonalRNN has it."""

    def call(v: Tensor, x: Tensor) -> Tensor:
        steps, batch, n = x.shape
        cheaper = factors_are_cheaper(n, v.shape[-1], steps * batch, x.device.type, x.dtype, x.device.index)
        return _states(ops.wy_factors(v) if cheaper else chart(v), x)

    return call


def _unformed(chart: OrthogonalMap) -> Callable[..., Tensor]:
    def call(*given: Tensor) -> Tensor:
        *free, x = given
        h, states = torch.zeros_like(x[0]), []
        for xt in x:
            h = chart.multiply(*free, h) + xt
            states.append(h)
        return torch.stack(states)

    return call


def _states(transition: Tensor | ops.WY, x: Tensor) -> Tensor:
    states, _ = ops.rollout(x, torch.zeros_like(x[0]), transition, None, "identity")
    assert isinstance(states, Tensor)
    return states
