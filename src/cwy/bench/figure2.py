"""Figure 2: a recurrence through L reflections one after another (HR), and through all of them at once (CWY).

From the reflection vectors, with the nonlinearity of the paper's translation: abs. CWY's factors are computed once for all
steps, on the clock.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .. import ops
from ..ops import dispatch
from ..ops.recurrence.functions import Request
from ..testing import double
from .entry import Case, Entry, gaussian
from .rnn import draw_states, off_kinks, one_at_a_time
from .sizes import Size

F = "abs"


def baseline(size: Size, device: str) -> str:
    return f"cwy, {'cuda' if device == 'cuda' else 'torch'}"


def entries(size: Size) -> list[Entry]:
    """HR, CWY by each backend, and CWY in a loop of its factors, as in the paper."""
    served = [backend for backend in dispatch.backends("rollout")["rollout"] if backend.name in ("cuda", "torch")]
    return [*(_at_once(size, backend) for backend in served), _loop(size), one_at_a_time(size, F)]


def _at_once(size: Size, backend: dispatch.Backend) -> Entry:
    n, count, batch, steps = size

    def call(h0: Tensor, served: str, x: Tensor, v: Tensor, b: Tensor) -> Tensor:
        states, _ = ops.rollout(x, h0, ops.wy_factors(v), b, F, backend=served)
        assert isinstance(states, Tensor)
        return states

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        inputs, h0 = _problem(size, dtype, device)
        return Case(partial(call, h0, backend.name), inputs, partial(call, double(h0), "torch"), None)

    def why_not(dtype: torch.dtype, device: torch.device) -> str | None:
        return backend.why_not(Request(n, batch, steps, dtype, device.type, F, count))

    about = f"ops.rollout(x, h0, ops.wy_factors(v), b, {F!r}, backend={backend.name!r})"
    return Entry(f"cwy, {backend.name}", about, make, group="ours", method="cwy", package="cwy", why_not=why_not)


def _loop(size: Size) -> Entry:
    def call(h: Tensor, x: Tensor, v: Tensor, b: Tensor) -> Tensor:
        (u, t), states = ops.wy_factors(v), []
        for xt in x:
            h = (h - ((h @ u) @ t.mT) @ u.mT + xt + b).abs()
            states.append(h)
        return torch.stack(states)

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        inputs, h0 = _problem(size, dtype, device)
        return Case(partial(call, h0), inputs, partial(call, double(h0)), None)

    return Entry("cwy, eager loop", "u, t = ops.wy_factors(v), then a loop of three products a step; autograd", make)


def _problem(size: Size, dtype: torch.dtype, device: torch.device) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """``(x, v, b)``, and h0."""
    n, count, batch, steps = size
    v = gaussian(n, count, dtype=dtype, device=device)
    x, h0, b = draw_states(n, batch, steps, F, dtype, device)
    return (off_kinks(F, x, h0, [ops.cwy_matrix(double(v))], b), v, b), h0
