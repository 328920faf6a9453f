"""The definition: a loop over time, differentiated by autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._precision import in_full_precision
from .nonlinearities import NONLINEARITIES
from .transition import mapped


def multiply(q: list[Tensor], h: Tensor) -> Tensor:
    """$Qh$ for each row of h, from Q, from its factors w, y, d, or as a convolution with a kernel."""
    if len(q) == 1:
        return h @ q[0].mT if q[0].dim() == 2 else mapped(h, q[0])
    w, y, d = q
    return h * d - (h @ y.conj()) @ w.mT


def step(
    x: Tensor,
    h: Tensor,
    q: list[Tensor],
    bias: Tensor | None,
    weight: Tensor | None,
    nonlinearity: str | Callable,
) -> Tensor:
    """Return the next states."""
    z = multiply(q, h) + (x if weight is None else mapped(x, weight))
    if callable(nonlinearity):
        return nonlinearity(z if bias is None else z + bias)
    f = NONLINEARITIES[nonlinearity]
    return f.define(z if bias is None or f.threshold else z + bias, bias)


@in_full_precision
def rollout(
    x: Tensor, h0: Tensor, q: list[Tensor], bias: Tensor | None, weight: Tensor | None, nonlinearity: str | Callable,
    sizes: list[int], memory: str, last: bool, steps: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the states ``(sum of sizes, N)`` of every step and the last one of each sequence, for x packed by ``sizes``.

    ``steps``, if given, is the number of steps, each with as many rows as ``sizes`` has in one number.
    """
    if steps is not None:
        sizes = sizes * steps
    h, states, ended = h0, [], []
    for t, xt in enumerate(x.split(sizes)):
        ended.append(h[sizes[t] :])
        h = step(xt, h[: sizes[t]], q, bias, weight, nonlinearity)
        states.append(h)
    hn = torch.cat([h, *reversed(ended)]) if any(e.shape[0] for e in ended) else h
    return torch.cat(states) if states and not last else h0[:0].clone(), hn
