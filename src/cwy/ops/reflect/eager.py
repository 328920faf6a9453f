"""The op in two parts for eager mode: factors once per step for many layers, then thin products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ..._torch import plain_apply, unsafe_view
from .factors import Factors, form, pull_back, working_dtype
from .product import Needs, backward, differentiable, forward, plain


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


def _joined(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
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


_form_all = plain_apply(_Formed)


def factors_of(vectors: Sequence[Tensor], dtype: torch.dtype) -> list[Factors]:
    """Compute the factors of vectors of one shape, dtype and device, in one batched call.

    No transform of ``torch.func`` may run.

    Args:
        vectors: each ``(N, L)``, or ``(B, N/B, L)``.
        dtype: of the factors, from :func:`cwy.ops.reflect.factors.factor_dtype`.
    """
    parts = _form_all(dtype, *vectors)
    count = len(vectors)
    pairs = zip(parts[:count], parts[count:], strict=True)
    return [Factors(left, right) for left, right in pairs]


def _rows(x: Tensor) -> Tensor:
    """Return ``x (..., N)`` as ``(R, N)``."""
    if x.dim() == 2:
        return x
    return x.reshape(-1, x.shape[-1])


def _shaped(rows: Tensor | None, like: Tensor) -> Tensor | None:
    """Return rows in the shape of ``like``, whose last dimension may have another size.

    Nobody else has the rows. A view would forbid the user to write to the result in place.
    """
    if rows is None or like.dim() == 2:
        return rows
    return unsafe_view(rows, (*like.shape[:-1], rows.shape[-1]))


class _Multiplied(Function):
    @staticmethod
    def forward(ctx, x, first, second, bias):
        y, c = forward(_rows(x), first, second, bias)
        ctx.save_for_backward(x, c, first, second, bias)
        return _shaped(y, x)

    @staticmethod
    def backward(ctx, gy):
        x, c, first, second, bias = ctx.saved_tensors
        needs = Needs(*ctx.needs_input_grad)
        if torch.is_grad_enabled():
            return differentiable(plain, gy, needs, x, first, second, bias)
        found = backward(_rows(gy), _rows(x), c, first, second, needs, bias)
        return _shaped(found.x, x), found.first, found.second, found.bias


_multiply = plain_apply(_Multiplied)


def multiply(x: Tensor, factors: Factors, bias: Tensor | None = None) -> Tensor:
    """Map each vector of ``x (..., N)`` by the matrix Q of the factors.

    With a bias b ``(N,)`` the result is $Q(x - b) + b$. No transform of ``torch.func`` may run.
    """
    return _multiply(x, factors.left, factors.right, _converted(bias, factors.left))


class _Adapted(Function):
    """Apply a frozen linear layer between two products. A step is faster with one node for all."""

    @staticmethod
    def forward(ctx, x, left, right, out_left, out_right, weight, bias):
        z, c = forward(_rows(x), left, right)
        # Looked up here, because tools replace the function.
        y = functional.linear(z, weight, bias)
        if out_left is None:
            ctx.save_for_backward(x, c, left, right, None, None, None, None, weight, None)
            return _shaped(y, x)
        after, d = forward(y, out_left, out_right, _converted(bias, out_left))
        ctx.save_for_backward(x, c, left, right, y, d, out_left, out_right, weight, bias)
        return _shaped(after, x)

    @staticmethod
    def backward(ctx, gy):
        x, c, left, right, y, d, out_left, out_right, weight, bias = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():
            inputs = (x, left, right, out_left, out_right, weight, bias)
            return differentiable(_plain_adapted, gy, needs, *inputs)
        needs_x, needs_left, needs_right, needs_out_left, needs_out_right, _, _ = needs
        g = _rows(gy)
        d_out_left = None
        d_out_right = None
        if out_left is not None:
            asked = Needs(True, needs_out_left, needs_out_right)
            found = backward(g, y, d, out_left, out_right, asked, _converted(bias, out_left))
            assert found.x is not None
            g = found.x
            d_out_left = found.first
            d_out_right = found.second
        asked = Needs(needs_x, needs_left, needs_right)
        found = backward(g.mm(weight), _rows(x), c, left, right, asked)
        dx = _shaped(found.x, x)
        return dx, found.first, found.second, d_out_left, d_out_right, None, None


def _plain_adapted(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    out_left: Tensor | None,
    out_right: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    y = functional.linear(plain(x, left, right), weight, bias)
    if out_left is None or out_right is None:
        return y
    return plain(y, out_left, out_right, _converted(bias, out_left))


def _converted(bias: Tensor | None, factor: Tensor) -> Tensor | None:
    """Return a bias in the dtype of a factor."""
    if bias is None:
        return None
    return bias.to(factor.dtype)


_adapt = plain_apply(_Adapted)


def adapted_linear(
    x: Tensor, into: Factors, out: Factors | None, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Apply a frozen linear layer between two products: ``multiply(linear(multiply(x)))``.

    Args:
        x: ``(..., N)``, in the dtype of the weight, which autocast leaves as it is.
        into: the factors of the product on the input side.
        out: the factors of the product on the output side, if there is one.
        weight: ``(M, N)``, without a gradient.
        bias: ``(M,)``, without a gradient. The product on the output side leaves it as it is.
    """
    out_left = None
    out_right = None
    if out is not None:
        out_left, out_right = out
    return _adapt(x, *into, out_left, out_right, weight, bias)
