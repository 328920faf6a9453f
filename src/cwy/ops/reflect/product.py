r"""The thin products $y = x - (x F + b)\,G^\top$ and their gradients, in the dtype of x.

F and G are the factors: ``left`` and ``right`` for Q, and the other way around for its adjoint.
The offset b keeps the bias of a layer out of a product behind it. Eager steps are bound by the
host, so nothing here launches or converts what need not be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._linalg import multiply
from .._precision import full_precision
from .factors import HALF


class Gradients(NamedTuple):
    """Hold the gradients of x, of both factors and of the offset. None was not asked for."""

    x: Tensor | None
    first: Tensor | None
    second: Tensor | None
    offset: Tensor | None


class Needs(NamedTuple):
    """Hold which gradients are asked for."""

    x: bool = True
    factors: bool = True
    offset: bool = False


def _runs_as_it_is(x: Tensor) -> bool:
    """Return whether products of x run in the dtype of x by themselves."""
    if x.dtype not in HALF:
        return False
    kind = x.device.type
    return not torch.is_autocast_enabled(kind) or torch.get_autocast_dtype(kind) == x.dtype


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


def _against(x: Tensor, c: Tensor, like: Tensor) -> Tensor:
    """Return ``-x.mT @ c``, in the shape of a factor. The values of ``like`` are not read."""
    if like.dim() == 2:
        return torch.addmm(like, x.mT, c, beta=0, alpha=-1)
    return torch.baddbmm(like, _blocks(x, like).mT, c, beta=0, alpha=-1)


def forward(
    x: Tensor, first: Tensor, second: Tensor, offset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``y (R, N)`` for ``x (R, N)``, and c, the L numbers per row and block.

    An offset ``(1, L)``, or ``(B, 1, L)``, is added to c.
    """
    if x.dtype != first.dtype:
        y, c = forward(x.to(first.dtype), first, second, offset)
        return y.to(x.dtype), c
    if _runs_as_it_is(x):
        return _forward(x, first, second, offset)
    with full_precision(x.device.type):
        return _forward(x, first, second, offset)


def _forward(
    x: Tensor, first: Tensor, second: Tensor, offset: Tensor | None
) -> tuple[Tensor, Tensor]:
    c = _times(x, first, offset)
    return _minus(x, c, second), c


def backward(
    gy: Tensor, x: Tensor, c: Tensor, first: Tensor, second: Tensor, needs: Needs
) -> Gradients:
    """Return the gradients from that of y, ``gy (R, N)``, and what the forward pass kept."""
    dtype = first.dtype
    if gy.dtype != dtype:
        found = backward(gy.to(dtype), x.to(dtype), c, first, second, needs)
        if found.x is None:
            return found
        return found._replace(x=found.x.to(x.dtype))
    if _runs_as_it_is(gy):
        return _backward(gy, x, c, first, second, needs)
    with full_precision(gy.device.type):
        return _backward(gy, x, c, first, second, needs)


def _backward(
    g: Tensor, x: Tensor, c: Tensor, first: Tensor, second: Tensor, needs: Needs
) -> Gradients:
    d = _times(g, second)
    dx = None
    d_first = None
    d_second = None
    d_offset = None
    if needs.x:
        dx = _minus(g, d, first)
    if needs.factors:
        d_first = _against(x, d, first)
        d_second = _against(g, c, second)
    if needs.offset:
        d_offset = -d.sum(-2, keepdim=True)
    return Gradients(dx, d_first, d_second, d_offset)


def plain(x: Tensor, first: Tensor, second: Tensor, offset: Tensor | None = None) -> Tensor:
    """Return y for ``x (..., N)`` in torch's own differentiable functions."""
    rows = x.reshape(-1, x.shape[-1]).to(first.dtype)
    if first.dim() == 2:
        c = multiply(rows, first)
        if offset is not None:
            c = c + offset
        y = rows - multiply(c, second.mT)
    else:
        c = multiply(_blocks(rows, first), first)
        if offset is not None:
            c = c + offset
        y = rows - multiply(c, second.mT).transpose(0, 1).flatten(1)
    return y.reshape(x.shape).to(x.dtype)


def differentiable(
    gy: Tensor, needs: Sequence[bool], *inputs: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of :func:`plain` so that they can be differentiated again.

    Args:
        gy: the gradient of y.
        needs: which gradients are asked for.
        inputs: of :func:`plain`.
    """
    asked = [x for x, needed in zip(inputs, needs, strict=True) if needed and x is not None]
    y = plain(*inputs)  # pyrefly: ignore[bad-argument-type]
    found = iter(torch.autograd.grad(y, asked, gy, create_graph=True))
    gradients: list[Tensor | None] = []
    for needed in needs:
        if needed:
            gradients.append(next(found))
        else:
            gradients.append(None)
    return tuple(gradients)
