"""Multiply by one matrix at every step of a loop, with one product for its gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ..._torch import backward_number
from ...ops._precision import autocast_dtype


class _Part(NamedTuple):
    """Hold the rows of one step, and the gradient of their product."""

    rows: Tensor
    delta: Tensor


Parts = dict[int, list[_Part]]
"""Parts of the gradient by backward pass, because a pass may end before it reaches the matrix."""

_current = backward_number


class _Gather(Function):
    """Return the matrix. Its backward runs last, when every product has left its part."""

    @staticmethod
    def forward(ctx, m: Tensor, parts: Parts) -> Tensor:
        ctx.parts = parts
        ctx.set_materialize_grads(False)
        return m.view_as(m)

    @staticmethod
    def backward(ctx, grad: Tensor | None) -> tuple[Tensor | None, None]:
        # Only second derivatives have a gradient besides the parts.
        parts = ctx.parts.pop(_current(), None)
        if parts is None:
            return grad, None
        rows = torch.cat([part.rows for part in parts], -2)
        deltas = torch.cat([part.delta for part in parts], -2)
        gathered = rows.mT @ deltas
        if grad is not None:
            gathered = gathered + grad
        return gathered, None


class _Product(Function):
    """Multiply, and leave the part of the matrix's gradient to :class:`_Gather`."""

    @staticmethod
    def forward(ctx, x: Tensor, m: Tensor, parts: Parts) -> Tensor:
        ctx.save_for_backward(x, m)
        ctx.parts = parts
        return x @ m

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        x, m = ctx.saved_tensors
        ctx.parts.setdefault(_current(), []).append(_Part(x, grad))
        return grad @ m.mT, None, None


class RepeatedProduct:
    r"""Compute $x_t M$ for many t, with one product for the gradient of M.

    The gradient is $\sum_t x_t^\top \delta_t$. Autograd would compute one product per step. Under
    autocast all products are in its dtype, and M is cast once.

    Args:
        m: ``(*, N, K)``.

    Example:
        >>> m, x = torch.randn(4, 3, requires_grad=True), torch.randn(2, 5, 4)
        >>> times = RepeatedProduct(m)
        >>> torch.stack([times(part) for part in x]).sum().backward()
        >>> torch.allclose(m.grad, x.flatten(0, 1).sum(0).unsqueeze(1).expand(4, 3), atol=1e-5)
        True
    """

    def __init__(self, m: Tensor) -> None:
        m = m.to(autocast_dtype(m))
        self._parts: Parts = {}
        self._m = m
        self._gathers = torch.is_grad_enabled() and m.requires_grad
        if self._gathers:
            self._m = _Gather.apply(m, self._parts)

    def __call__(self, x: Tensor) -> Tensor:
        """Map ``(*, rows, N)`` to ``(*, rows, K)``."""
        x = x.to(self._m.dtype)
        if self._gathers:
            return _Product.apply(x, self._m, self._parts)
        return x @ self._m
