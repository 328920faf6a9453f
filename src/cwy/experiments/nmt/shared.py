"""A matrix that multiplies at every step of a loop, with one product for its gradient at the end."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Taken = dict[int, list[tuple[Tensor, Tensor]]]
"""Rows and their gradients, by the number of the backward that met them: one may end before it comes to the matrix."""

_current = torch._C._current_graph_task_id


class _Gather(Function):
    """The matrix itself; autograd comes here last, when every product has left its part of the gradient."""

    @staticmethod
    def forward(ctx, m: Tensor, taken: Taken) -> Tensor:
        ctx.taken = taken
        ctx.set_materialize_grads(False)
        return m.view_as(m)

    @staticmethod
    @once_differentiable
    def backward(ctx, _) -> tuple[Tensor | None, None]:
        parts = ctx.taken.pop(_current(), None)
        if parts is None:
            return None, None
        rows, deltas = (torch.cat(part, -2) for part in zip(*parts, strict=True))
        return rows.mT @ deltas, None


class _Product(Function):
    @staticmethod
    def forward(ctx, x: Tensor, m: Tensor, taken: Taken) -> Tensor:
        ctx.save_for_backward(x, m)
        ctx.taken = taken
        return x @ m

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        x, m = ctx.saved_tensors
        ctx.taken.setdefault(_current(), []).append((x, grad))
        return grad @ m.mT, None, None


class Shared:
    r"""$x_t \mapsto x_t M$ for many t. The gradient of M is $\sum_t x_t^\top \delta_t$: one product, not one a step.

    Args:
        m: ``(*, N, K)``.

    Example:
        >>> m, x = torch.randn(4, 3, requires_grad=True), torch.randn(2, 5, 4)
        >>> shared = Shared(m)
        >>> torch.stack([shared(part) for part in x]).sum().backward()
        >>> torch.allclose(m.grad, x.flatten(0, 1).sum(0).unsqueeze(1).expand(4, 3), atol=1e-5)
        True
    """

    def __init__(self, m: Tensor) -> None:
        self._taken: Taken = {}
        self._m = (
            _Gather.apply(m, self._taken) if torch.is_grad_enabled() and m.requires_grad else m
        )

    def __call__(self, x: Tensor) -> Tensor:
        """``(*, rows, N)`` to ``(*, rows, K)``."""
        return _Product.apply(x, self._m, self._taken) if self._m.requires_grad else x @ self._m
