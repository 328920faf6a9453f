"""The op in two parts for eager mode: factors once per step for many layers, then thin products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..._torch import plain_apply
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
        factors, kept = form(_joined(vectors).to(work), dtype)
        ctx.right = factors.right
        ctx.kept = kept
        ctx.dtype = vectors[0].dtype
        ctx.blocked = vectors[0].dim() == 3
        ctx.set_materialize_grads(False)
        count = len(vectors)
        left = _parts(factors.left, count, ctx.blocked)
        return *left, *_parts(factors.right, count, ctx.blocked)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        count = len(gradients) // 2
        d_left = _filled(gradients[:count])
        d_right = _filled(gradients[count:])
        if d_left is None and d_right is None:
            return None, *([None] * count)
        dv = pull_back(ctx.right, ctx.kept, d_left, d_right).to(ctx.dtype)
        found: list[Tensor | None] = list(_parts(dv, count, ctx.blocked))
        for place in range(count):
            if gradients[place] is None and gradients[count + place] is None:
                # A layer that was not used has no gradient, so that no optimizer moves it.
                found[place] = None
        return None, *found


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors ``(N, L)``, or ``(B, N/B, L)``, as one batch of matrices."""
    if tensors[0].dim() == 3:
        if len(tensors) == 1:
            return tensors[0]
        return torch.cat(tensors)
    if len(tensors) == 1:
        return tensors[0].unsqueeze(0)
    return torch.stack(tensors)


def _parts(batch: Tensor, count: int, blocked: bool) -> Sequence[Tensor]:
    """Return what :func:`_joined` joined."""
    if blocked:
        return batch.chunk(count)
    return batch.unbind(0)


def _filled(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return gradients as one tensor, zero where there is none."""
    known = [g for g in gradients if g is not None]
    if not known:
        return None
    if len(known) == len(gradients):
        return _joined(known)
    zero = torch.zeros_like(known[0])
    filled = []
    for g in gradients:
        if g is None:
            g = zero
        filled.append(g)
    return _joined(filled)


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
    def forward(ctx, x, first, second, bias):
        rows = x
        if x.dim() != 2:
            rows = x.reshape(-1, x.shape[-1])
        y, c = forward(rows, first, second, bias)
        ctx.save_for_backward(x, c, first, second, bias)
        if rows is x:
            return y
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, gy):
        x, c, first, second, bias = ctx.saved_tensors
        needs = Needs(*ctx.needs_input_grad)
        if torch.is_grad_enabled():
            return differentiable(gy, needs, x, first, second, bias)
        if gy.dim() == 2:
            return backward(gy, x, c, first, second, needs, bias)
        x = x.reshape(-1, x.shape[-1])
        found = backward(gy.reshape(x.shape), x, c, first, second, needs, bias)
        if found.x is None:
            return found
        return found._replace(x=found.x.view(gy.shape))


_multiply = plain_apply(_Multiplied)


def multiply(x: Tensor, factors: Factors, bias: Tensor | None = None) -> Tensor:
    """Map each vector of ``x (..., N)`` by the matrix Q of the factors.

    With a bias b ``(N,)`` the result is $Q(x - b) + b$. No transform of ``torch.func`` may run.
    """
    if bias is not None:
        bias = bias.to(factors.left.dtype)
    return _multiply(x, factors.left, factors.right, bias)
