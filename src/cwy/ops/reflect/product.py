r"""The thin products $y = x - (x F + b)\,G^\top$ and their gradients, in the dtype of x.

F and G are the factors: ``left`` and ``right`` for Q, and the other way around for its adjoint.
The offset b keeps the bias of a layer out of a product behind it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from .._precision import full_precision
from .factors import _HALF

_NOTHING = nullcontext()


class Gradients(NamedTuple):
    """The gradients of x, of both factors and of the offset. None was not asked for."""

    x: Tensor | None
    first: Tensor | None
    second: Tensor | None
    offset: Tensor | None


def _as_it_is(x: Tensor) -> AbstractContextManager[None]:
    """Return a context in which products of x run in the dtype of x, not in autocast's."""
    kind = x.device.type
    if x.dtype in _HALF:
        if not torch.is_autocast_enabled(kind):
            return _NOTHING
        if torch.get_autocast_dtype(kind) == x.dtype:
            return _NOTHING
    return full_precision(kind)


def _blocks(x: Tensor, factor: Tensor) -> Tensor:
    """Return ``x (R, N)`` as ``(B, R, N/B)``, without a copy."""
    return x.unflatten(-1, factor.shape[:2]).transpose(0, 1)


def _times(x: Tensor, factor: Tensor, offset: Tensor | None = None) -> Tensor:
    """Return ``x @ factor + offset``: ``(R, L)``, or ``(B, R, L)`` for blocks."""
    if factor.dim() == 2:
        if offset is None:
            return torch.mm(x, factor)
        return torch.addmm(offset, x, factor)
    if offset is None:
        return torch.bmm(_blocks(x, factor), factor)
    return torch.baddbmm(offset, _blocks(x, factor), factor)


def _minus(x: Tensor, c: Tensor, factor: Tensor) -> Tensor:
    """Return ``x - c @ factor.mT``."""
    if factor.dim() == 2:
        return torch.addmm(x, c, factor.mT, alpha=-1)
    result = x.clone()
    _blocks(result, factor).baddbmm_(c, factor.mT, alpha=-1)
    return result


def _against(x: Tensor, c: Tensor) -> Tensor:
    """Return ``-x.mT @ c``, of the shape of a factor."""
    if c.dim() == 2:
        return torch.mm(x.mT, c).neg_()
    blocks = x.unflatten(-1, (c.shape[0], -1)).transpose(0, 1)
    return torch.bmm(blocks.mT, c).neg_()


def forward(
    x: Tensor, first: Tensor, second: Tensor, offset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``y (R, N)`` for ``x (R, N)``, and c, the L numbers per row and block.

    An offset ``(1, L)``, or ``(B, 1, L)``, is added to c.
    """
    rows = x.to(first.dtype)
    with _as_it_is(rows):
        c = _times(rows, first, offset)
        y = _minus(rows, c, second)
    return y.to(x.dtype), c


def backward(
    gy: Tensor,
    x: Tensor,
    c: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    needs_x: bool,
    needs_factors: bool,
    needs_offset: bool = False,
) -> Gradients:
    """Return the gradients from that of y, ``gy (R, N)``, and what the forward pass kept."""
    g = gy.to(first.dtype)
    dx = None
    d_first = None
    d_second = None
    d_offset = None
    with _as_it_is(g):
        d = _times(g, second)
        if needs_x:
            dx = _minus(g, d, first).to(x.dtype)
        if needs_factors:
            d_first = _against(x.to(first.dtype), d)
            d_second = _against(g, c)
        if needs_offset:
            d_offset = d.sum(-2, keepdim=True).neg_()
    return Gradients(dx, d_first, d_second, d_offset)
