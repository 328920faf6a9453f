"""The op in two parts for eager mode: factors once per step for many layers, then thin products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .._precision import full_precision
from .factors import Factors, form, pull_back, working_dtype
from .product import Needs, backward, differentiable, forward


class _Formed(Function):
    """Compute the factors of a list of vectors of one shape.

    What the backward pass takes are attributes, not saved tensors. So several backward passes may
    go through it, as in gradient accumulation, and a checkpoint does not count them.
    """

    @staticmethod
    def forward(ctx, dtype, *vectors):
        work = working_dtype(vectors[0], dtype)
        if len(vectors) == 1:
            stacked = vectors[0].unsqueeze(0)
        else:
            stacked = torch.stack(vectors)
        factors, kept = form(stacked.to(work), dtype)
        ctx.right = factors.right
        ctx.kept = kept
        ctx.dtype = vectors[0].dtype
        ctx.set_materialize_grads(False)
        return *factors.left.unbind(0), *factors.right.unbind(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        count = len(gradients) // 2
        d_left = _stacked(gradients[:count])
        d_right = _stacked(gradients[count:])
        if d_left is None and d_right is None:
            return None, *([None] * count)
        dv = pull_back(ctx.right, ctx.kept, d_left, d_right).to(ctx.dtype)
        found: list[Tensor | None] = list(dv.unbind(0))
        for place in range(count):
            if gradients[place] is None and gradients[count + place] is None:
                # A layer that was not used has no gradient, so that no optimizer moves it.
                found[place] = None
        return None, *found


def _stacked(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return gradients as one tensor, zero where there is none."""
    known = [g for g in gradients if g is not None]
    if not known:
        return None
    if len(known) == len(gradients):
        return torch.stack(known)
    zero = torch.zeros_like(known[0])
    filled = []
    for g in gradients:
        if g is None:
            g = zero
        filled.append(g)
    return torch.stack(filled)


def factors_of(vectors: Sequence[Tensor], dtype: torch.dtype) -> list[Factors]:
    """Compute the factors of vectors of one shape, dtype and device, in one batched call.

    Args:
        vectors: each ``(N, L)``, or ``(B, N/B, L)``.
        dtype: of the factors, from :func:`cwy.ops.reflect.factors.factor_dtype`.
    """
    parts = _Formed.apply(dtype, *vectors)
    count = len(vectors)
    pairs = zip(parts[:count], parts[count:], strict=True)
    return [Factors(left, right) for left, right in pairs]


class _Multiplied(Function):
    @staticmethod
    def forward(ctx, x, first, second, offset):
        rows = x
        if x.dim() != 2:
            rows = x.reshape(-1, x.shape[-1])
        y, c = forward(rows, first, second, offset)
        ctx.save_for_backward(x, c, first, second, offset)
        if x.dim() == 2:
            return y
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, gy):
        x, c, first, second, offset = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiable(gy, ctx.needs_input_grad, x, first, second, offset)
        needs_x, needs_factors, _, needs_offset = ctx.needs_input_grad
        g = gy
        if x.dim() != 2:
            x = x.reshape(-1, x.shape[-1])
            g = gy.reshape(x.shape)
        found = backward(g, x, c, first, second, Needs(needs_x, needs_factors, needs_offset))
        dx = found.x
        if dx is not None and gy.dim() != 2:
            dx = dx.view(gy.shape)
        return dx, found.first, found.second, found.offset


def multiply(x: Tensor, factors: Factors, bias: Tensor | None = None) -> Tensor:
    """Map each vector of ``x (..., N)`` by the matrix Q of the factors.

    With a bias b ``(N,)`` the result is $Q(x - b) + b$.
    """
    if bias is None:
        return _Multiplied.apply(x, factors.left, factors.right, None)
    return _Multiplied.apply(x, factors.left, factors.right, _offset(bias, factors.left))


def _offset(bias: Tensor, left: Tensor) -> Tensor:
    """Return what a bias takes from c: ``(1, L)``, or ``(B, 1, L)``."""
    row = bias.to(left.dtype).reshape(*left.shape[:-2], 1, left.shape[-2])
    with full_precision(left.device.type):
        return torch.matmul(row, left).neg()
