r"""The thin products $y = x + (x - b) F\,G^\top$ and their gradients, in the dtype of x.

F and G are the factors: ``left`` and ``right`` for Q, and the other way around for its adjoint.
The bias b of a layer stays as it is under a product behind the layer. Eager steps are bound by the
host, so nothing here launches or converts what need not be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._linalg import add_product_, multiply
from .._precision import active_autocast, full_precision
from .factors import HALF


class Gradients(NamedTuple):
    """Hold the gradients of x, of both factors and of the bias. None was not asked for."""

    x: Tensor | None
    first: Tensor | None
    second: Tensor | None
    bias: Tensor | None


class Needs(NamedTuple):
    """Hold which gradients are asked for."""

    x: bool = True
    first: bool = True
    second: bool = True
    bias: bool = False


def _runs_as_it_is(x: Tensor) -> bool:
    """Return whether products of x run in the dtype of x by themselves."""
    return x.dtype in HALF and is_left_by_autocast(x)


def is_left_by_autocast(x: Tensor) -> bool:
    """Return whether autocast leaves x in its dtype."""
    return active_autocast(x.device.type) in (None, x.dtype)


def _blocks(x: Tensor, factor: Tensor) -> Tensor:
    """Return ``x (R, N)`` as ``(B, R, N/B)``, without a copy."""
    # Batched gradients have no rule for unflatten.
    return x.view(x.shape[0], *factor.shape[:2]).transpose(0, 1)


def _times(x: Tensor, factor: Tensor) -> Tensor:
    """Return ``x @ factor``: ``(R, L)``, or ``(B, R, L)`` for blocks."""
    if factor.dim() == 2:
        return x.mm(factor)
    return torch.bmm(_blocks(x, factor), factor)


def _without(bias: Tensor, x: Tensor, factor: Tensor) -> Tensor:
    """Return ``(x - bias) @ factor``."""
    offset = _times(bias.unsqueeze(0), factor)
    if factor.dim() == 2:
        return torch.addmm(offset, x, factor, beta=-1)
    return torch.baddbmm(offset, _blocks(x, factor), factor, beta=-1)


def _plus(x: Tensor, c: Tensor, factor: Tensor) -> Tensor:
    """Return ``x + c @ factor.mT``."""
    if factor.dim() == 2:
        return x.addmm(c, factor.t())
    result = x.clone()
    _blocks(result, factor).baddbmm_(c, factor.mT)
    return result


def _against(x: Tensor, c: Tensor, like: Tensor) -> Tensor:
    """Return ``x.mT @ c``, in the shape of a factor."""
    if like.dim() == 2:
        return x.t().mm(c)
    return torch.bmm(_blocks(x, like).mT, c)


def forward(
    x: Tensor, first: Tensor, second: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``y (R, N)`` for ``x (R, N)``, and c, the L numbers per row and block."""
    if x.dtype != first.dtype:
        y, c = forward(x.to(first.dtype), first, second, bias)
        return y.to(x.dtype), c
    if _runs_as_it_is(x):
        return _forward(x, first, second, bias)
    with full_precision(x.device.type):
        return _forward(x, first, second, bias)


def _forward(
    x: Tensor, first: Tensor, second: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    if bias is None:
        c = _times(x, first)
    else:
        c = _without(bias, x, first)
    return _plus(x, c, second), c


def backward(
    gy: Tensor,
    x: Tensor,
    c: Tensor,
    first: Tensor,
    second: Tensor,
    needs: Needs,
    bias: Tensor | None = None,
) -> Gradients:
    """Return the gradients from that of y, ``gy (R, N)``, and what the forward pass kept."""
    dtype = first.dtype
    if gy.dtype != dtype:
        found = backward(gy.to(dtype), x.to(dtype), c, first, second, needs, bias)
        if found.x is None:
            return found
        return found._replace(x=found.x.to(x.dtype))
    if _runs_as_it_is(gy):
        return _backward(gy, x, c, first, second, needs, bias)
    with full_precision(gy.device.type):
        return _backward(gy, x, c, first, second, needs, bias)


def _backward(
    g: Tensor,
    x: Tensor,
    c: Tensor,
    first: Tensor,
    second: Tensor,
    needs: Needs,
    bias: Tensor | None,
) -> Gradients:
    d = _times(g, second)
    dx = None
    d_first = None
    d_second = None
    d_bias = None
    if needs.x:
        dx = _plus(g, d, first)
    if needs.first:
        d_first = _against(x, d, first)
    if needs.second:
        d_second = _against(g, c, second)
    if bias is not None:
        total = d.sum(-2, keepdim=True)
        if d_first is not None:
            row = bias.unsqueeze(0)
            if first.dim() == 3:
                row = _blocks(row, first)
            add_product_(d_first, row.mT, total, alpha=-1)
        if needs.bias:
            d_bias = -torch.matmul(total, first.mT).reshape(-1)
    return Gradients(dx, d_first, d_second, d_bias)


def plain(x: Tensor, first: Tensor, second: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return y for ``x (..., N)`` in torch's own differentiable functions."""
    rows = x.reshape(-1, x.shape[-1]).to(first.dtype)
    moved = rows
    if bias is not None:
        moved = rows - bias
    if first.dim() == 2:
        y = rows + multiply(multiply(moved, first), second.mT)
    else:
        c = multiply(_blocks(moved, first), first)
        y = rows + multiply(c, second.mT).transpose(0, 1).flatten(1)
    return y.reshape(x.shape).to(x.dtype)


def differentiable(
    function: Callable[..., Tensor], gy: Tensor, needs: Sequence[bool], *inputs: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return gradients so that they can be differentiated again.

    Args:
        function: of torch's own differentiable functions, such as :func:`plain`.
        gy: the gradient of its result.
        needs: which gradients are asked for.
        inputs: of the function.
    """
    asked = [x for x, needed in zip(inputs, needs, strict=True) if needed and x is not None]
    found = iter(torch.autograd.grad(function(*inputs), asked, gy, create_graph=True))
    gradients: list[Tensor | None] = []
    for needed in needs:
        if needed:
            gradients.append(next(found))
        else:
            gradients.append(None)
    return tuple(gradients)
