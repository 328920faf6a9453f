"""The op as ``torch.ops.cwy.reflect``, with a registered backward op. Compilers see one node."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function

from ..._torch import below_autograd
from .._library import define
from . import composite, product
from .factors import Factors, Kept, factor_dtype, form, pull_back, working_dtype


def _ordered(factors: Factors, adjoint: bool) -> tuple[Tensor, Tensor]:
    """Return the factors in the order in which x meets them."""
    if adjoint:
        return factors.right, factors.left
    return factors.left, factors.right


def _reflect(x: Tensor, v: Tensor, adjoint: bool) -> tuple[Tensor, ...]:
    with torch.no_grad():
        work = v.to(working_dtype(v, x.dtype))
        factors, kept = form(work, factor_dtype(v, x.dtype))
        rows = x.reshape(-1, x.shape[-1])
        y, c = product.forward(rows, *_ordered(factors, adjoint))
        # No result of an op may be another one.
        kept = kept._replace(scale=kept.scale.clone())
        results = (y.reshape(x.shape), c, *factors, *kept)
        return tuple(part.contiguous() for part in results)


def _reflect_backward(
    gy: Tensor,
    x: Tensor,
    c: Tensor,
    factors: list[Tensor],
    kept: list[Tensor],
    adjoint: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        first, second = _ordered(Factors(*factors), adjoint)
        rows = x.reshape(-1, x.shape[-1])
        g = gy.reshape(rows.shape)
        found = product.backward(g, rows, c, first, second, product.Needs())
        d_left = found.first
        d_right = found.second
        if adjoint:
            d_left, d_right = d_right, d_left
        dv = pull_back(factors[1], Kept(*kept), d_left, d_right)
        assert found.x is not None
        return found.x.reshape(x.shape).contiguous(), dv.to(dtype).contiguous()


def _fake_reflect(x: Tensor, v: Tensor, adjoint: bool) -> tuple[Tensor, ...]:
    work = working_dtype(v, x.dtype)
    dtype = factor_dtype(v, x.dtype)
    size = v.shape[-1]
    rows = x.numel() // x.shape[-1]
    row = (*v.shape[:-2], 1, size)
    return (
        x.new_empty(x.shape),
        x.new_empty((*v.shape[:-2], rows, size), dtype=dtype),
        v.new_empty(v.shape, dtype=dtype),
        v.new_empty(v.shape, dtype=dtype),
        v.new_empty((*v.shape[:-2], size, size), dtype=work),
        v.new_empty(row, dtype=work),
        v.new_empty(row, dtype=work),
    )


class _Reflect(Function):
    @staticmethod
    def forward(ctx, x, v, adjoint):
        with below_autograd():
            y, *rest = torch.ops.cwy.reflect(x, v, adjoint)
        ctx.save_for_backward(x, v, *rest)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*rest)
        ctx.adjoint = adjoint
        ctx.dtype = v.dtype
        return y, *rest

    @staticmethod
    def backward(ctx, gy, *_):
        if gy is None:
            return None, None, None
        x, v, c, left, right, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            needs = ctx.needs_input_grad[:2]
            return *composite.gradients(gy, x, v, ctx.adjoint, needs), None
        dx, dv = torch.ops.cwy.reflect_backward(
            gy, x, c, [left, right], kept, ctx.adjoint, ctx.dtype
        )
        return dx, dv, None


class _Last(Function):
    """Run the backward op. It has no derivative."""

    @staticmethod
    def forward(ctx, gy, x, c, factors, kept, adjoint, dtype):
        with below_autograd():
            return torch.ops.cwy.reflect_backward(gy, x, c, factors, kept, adjoint, dtype)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "reflect: a compiled or exported program has no second derivative. Run it in eager "
            "mode."
        )


define(
    "reflect(Tensor x, Tensor v, bool adjoint) -> (Tensor y, Tensor c, Tensor left, "
    "Tensor right, Tensor t, Tensor reciprocal, Tensor scale)",
    _reflect,
    _fake_reflect,
    lambda x, v, adjoint: _Reflect.apply(x, v, adjoint),
)
define(
    "reflect_backward(Tensor gy, Tensor x, Tensor c, Tensor[] factors, Tensor[] kept, "
    "bool adjoint, ScalarType dtype) -> (Tensor dx, Tensor dv)",
    _reflect_backward,
    lambda gy, x, c, factors, kept, adjoint, dtype: (
        x.new_empty(x.shape),
        x.new_empty(factors[0].shape, dtype=dtype),
    ),
    lambda *given: _Last.apply(*given),
)
