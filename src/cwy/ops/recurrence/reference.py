"""The definition: a loop over time, differentiated by autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..precision import in_full_precision
from .nonlinearities import NONLINEARITIES
from .transition import mapped


def multiply(q: list[Tensor], h: Tensor) -> Tensor:
    """$Qh$ for each row of h, from Q, from its factors w, y, d, or as a convolution with a kernel."""
    if len(q) == 1:
        return h @ q[0].mT if q[0].dim() == 2 else mapped(h, q[0])
    w, y, d = q
    return h * d - (h @ y.conj()) @ w.mT


@in_full_precision
def rollout(
    x: Tensor, h0: Tensor, q: list[Tensor], bias: Tensor | None, weight: Tensor | None, nonlinearity: str | Callable,
    sizes: list[int], memory: str, last: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """States ``(sum of sizes, N)`` of every step and the last one of each sequence, for x packed by ``sizes``."""
    h, states, ended = h0, [], []
    for t, xt in enumerate(x.split(sizes)):
        ended.append(h[sizes[t] :])
        z = multiply(q, h[: sizes[t]]) + (xt if weight is None else mapped(xt, weight))
        if callable(nonlinearity):
            h = nonlinearity(z if bias is None else z + bias)
        else:
            f = NONLINEARITIES[nonlinearity]
            h = f.define(z if bias is None or f.threshold else z + bias, bias)
        states.append(h)
    hn = torch.cat([h, *reversed(ended)]) if any(e.shape[0] for e in ended) else h
    return torch.cat(states) if states and not last else h0[:0].clone(), hn
