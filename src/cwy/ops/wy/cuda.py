"""The op by kernels, in float32 on an NVIDIA GPU: a few launches each way.

:mod:`.tiers` chooses among three ways by size: :mod:`.fused`, :mod:`.blocked` and
:mod:`.split_fp16`. A second derivative is computed by :mod:`.analytic`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ..._torch import dispatch_mode_count, has_storage, plain_apply
from .. import _nvrtc, dispatch
from .._linalg import add_product_
from .._precision import in_full_precision
from ..dispatch import why_only_aten, why_only_autograd
from . import analytic, blocked, fused, split_fp16, tiers
from .analytic import FactorGradients, MultiplyGradients, Saved
from .blocked import sign_rows_
from .composite import sign_columns
from .fused import Factors
from .passes import Backward
from .tiers import Tier, Way

dispatch.forget_plans()
_PRODUCTS = {Way.BLOCKED: blocked, Way.SPLIT_FP16: split_fp16}
_NO_GRADIENTS = FactorGradients(None, None)


def why_not(*tensors: Tensor) -> str | None:
    """Return the reasons why the kernels can't serve, or None."""
    if _serves(tensors):
        return None
    if traced := why_only_aten(*tensors):
        return traced
    v = tensors[0]
    reasons = []
    if not v.is_cuda:
        reasons.append(f"v is on {v.device.type}")
    elif not _capable(v.get_device()):
        reasons.append("it needs an NVIDIA GPU of capability 8.0")
    if missing := _nvrtc.why_not():
        reasons.append(missing)
    if v.numel() == 0:
        reasons.append("v is empty")
    elif v.shape[-2] * v.shape[-1] >= 2**30:
        reasons.append("it counts the entries of a matrix in 30 bits")
    for x in tensors:
        if x.dtype != torch.float32:
            reasons.append(f"it computes in float32, and this is {x.dtype}")
        if type(x) not in (Tensor, torch.nn.Parameter) or not has_storage(x):
            reasons.append("an argument is not a plain tensor")
    if dispatch_mode_count() > 0:
        reasons.append("a mode is active, which sees ATen ops")
    return "; ".join(reasons) or None


def _serves(tensors: tuple[Tensor, ...]) -> bool:
    """Return whether the kernels clearly serve. It costs less than to look for reasons."""
    v = tensors[0]
    if not v.is_cuda or not 0 < v.numel() < 2**30:
        return False
    for x in tensors:
        if x.dtype != torch.float32:
            return False
    return dispatch.is_plain_eager(*tensors) and _compiles_for(v.get_device())


@functools.cache
def _compiles_for(device: int) -> bool:
    """Return whether kernels can be compiled for a GPU and run on it."""
    return _capable(device) and _nvrtc.why_not() is None


def why_pass(*tensors: Tensor) -> str | None:
    """Return the reason why another backend is the better choice, or None."""
    v = tensors[0]
    if v.is_cuda and tiers.is_slow(v):
        return "it adds up in float64, which is slow on this GPU"
    return None


@functools.cache
def _capable(device: int) -> bool:
    return not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)


def _needs_aten(z: Tensor | None, given: FactorGradients = _NO_GRADIENTS) -> bool:
    """Return whether ATen ops must compute the backward pass.

    They do if it is differentiated again, if the factors have gradients, or if the kernels can't
    take z, for example a batch of gradients under ``vmap``.
    """
    if z is None or given.u is not None or given.t is not None:
        return True
    return torch.is_grad_enabled() or why_not(z) is not None


def _signed(x: Tensor | None, signs: Tensor | None) -> Tensor | None:
    """Return a gradient, if there is one, with its columns times signs."""
    if x is None:
        return None
    return sign_columns(x, signs)


def _factors(v: Tensor) -> Factors:
    if tiers.choose(v).factors is Way.FUSED:
        return fused.factors(v)
    return _large_factors(v)


_large_factors = in_full_precision(blocked.factors)


class _Factors(Function):
    @staticmethod
    def forward(ctx, v):
        u, t, reciprocal = _factors(v)
        ctx.save_for_backward(v, u, t, reciprocal)
        ctx.set_materialize_grads(False)
        return u, t

    @staticmethod
    def backward(ctx, gu, gt):
        saved = Saved(*ctx.saved_tensors)
        fuses = tiers.choose(saved.u).factors is Way.FUSED and not _needs_aten(gt)
        if fuses and gu is not None:
            fuses = why_not(gu) is None
        if not fuses:
            return analytic.factors_backward(saved, FactorGradients(gu, gt))
        return fused.factors_gradient(saved.u, saved.t, saved.reciprocal, gu, gt)


class _Fused(Function):
    """Compute what one launch can each way: a "matrix", or a "truncated" one."""

    @staticmethod
    def forward(ctx, v, signs, plan):
        v = v.contiguous()
        kept, result = fused.packed_forward(plan, v, signs)
        q = None
        if plan.forward.full_rank:
            q = result
        ctx.save_for_backward(v, kept, q, signs)
        ctx.plan = plan
        return result

    @staticmethod
    def backward(ctx, z):
        v, kept, q, signs = ctx.saved_tensors
        plan = ctx.plan
        if not _needs_aten(z):
            return fused.packed_gradient(plan, kept, z, q, signs), None, None
        reciprocal = fused.unpack(kept, plan).reciprocal
        u, t = _Factors.apply(v)
        saved = Saved(v, u, t, reciprocal)
        z = _signed(z, signs)
        if plan.wanted == "truncated":
            return analytic.truncated_backward(saved, z, _NO_GRADIENTS), None, None
        if q is not None:
            q = sign_columns(q, signs)
        return analytic.matrix_backward(saved, q, z, _NO_GRADIENTS), None, None


_apply_fused = plain_apply(_Fused)


class _Wide(Function):
    """Compute large matrices with L >= N, whose gradient takes no T."""

    @staticmethod
    def forward(ctx, v, signs):
        u, _, reciprocal, q, y = _large_matrix(v, signs, tiers.choose(v))
        ctx.save_for_backward(v, u, y, reciprocal, q, signs)
        return q

    @staticmethod
    def backward(ctx, z):
        v, u, y, reciprocal, q, signs = ctx.saved_tensors
        if _needs_aten(z):
            u, t = _Factors.apply(v)
            saved = Saved(v, u, t, reciprocal)
            q = sign_columns(q, signs)
            return analytic.matrix_backward(saved, q, _signed(z, signs), _NO_GRADIENTS), None
        way = tiers.choose(u).gradient
        return _large_wide_gradient(u, y, reciprocal, q, z, signs, way=way), None


class _Narrow(Function):
    """Compute large matrices with L < N. The factors are outputs too, for a second derivative."""

    @staticmethod
    def forward(ctx, v, signs):
        u, t, reciprocal, q, y = _large_matrix(v, signs, tiers.choose(v))
        ctx.save_for_backward(v, u, t, reciprocal, y, signs)
        ctx.set_materialize_grads(False)
        return q, u, t

    @staticmethod
    def backward(ctx, z, gu, gt):
        v, u, t, reciprocal, y, signs = ctx.saved_tensors
        given = FactorGradients(gu, gt)
        if _needs_aten(z, given):
            saved = Saved(v, u, t, reciprocal)
            return analytic.matrix_backward(saved, None, _signed(z, signs), given), None
        tier = tiers.choose(u)
        return _large_narrow_gradient(u, t, reciprocal, y, z, signs, tier=tier), None


class _Large(NamedTuple):
    """Hold a large matrix q, its columns times signs, y, its rows times signs, and the factors."""

    u: Tensor
    t: Tensor
    reciprocal: Tensor
    q: Tensor
    y: Tensor


@in_full_precision
def _large_matrix(v: Tensor, signs: Tensor | None, tier: Tier) -> _Large:
    products = _PRODUCTS[tier.matrix]
    if tier.factors is Way.FUSED:
        formed = fused.forward(v, "y")
        y = sign_rows_(formed.result, signs)
        q = products.matrix_from_y(formed.u, y, signs)
        return _Large(formed.u, formed.factor, formed.reciprocal, q, y)
    factors = blocked.factors(v)
    q, y = products.matrix(factors.u, factors.t, signs)
    return _Large(factors.u, factors.t, factors.reciprocal, q, y)


@in_full_precision
def _large_wide_gradient(
    u: Tensor,
    y: Tensor,
    reciprocal: Tensor,
    q: Tensor,
    z: Tensor,
    signs: Tensor | None,
    *,
    way: Way,
) -> Tensor:
    return _PRODUCTS[way].wide_gradient(u, y, reciprocal, q, z, signs)


@in_full_precision
def _large_narrow_gradient(
    u: Tensor,
    t: Tensor,
    reciprocal: Tensor,
    y: Tensor,
    z: Tensor,
    signs: Tensor | None,
    *,
    tier: Tier,
) -> Tensor:
    if tier.factors is Way.BLOCKED:
        return _PRODUCTS[tier.gradient].narrow_gradient(u, t, reciprocal, y, z, signs)
    w = u @ t
    a = z @ y
    b = sign_rows_(z.mT @ w, signs)
    return fused.end_gradient(u, t, reciprocal, w=w, a=a, b=b)


class _Truncated(Function):
    """Compute the first columns of large matrices."""

    @staticmethod
    def forward(ctx, v, signs):
        u, t, reciprocal, omega = _large_truncated(v, signs)
        ctx.save_for_backward(v, u, t, reciprocal, signs)
        ctx.set_materialize_grads(False)
        return omega, u, t

    @staticmethod
    def backward(ctx, z, gu, gt):
        *kept, signs = ctx.saved_tensors
        saved = Saved(*kept)
        given = FactorGradients(gu, gt)
        if _needs_aten(z, given):
            return analytic.truncated_backward(saved, _signed(z, signs), given), None
        z = sign_columns(z, signs)
        return _large_truncated_gradient(saved.u, saved.t, saved.reciprocal, z), None


@in_full_precision
def _large_truncated(v: Tensor, signs: Tensor | None) -> fused.Formed:
    u, t, reciprocal = blocked.factors(v)
    omega = blocked.eye_minus(u, t @ u[..., : u.shape[-1], :].mT)
    if signs is not None:
        omega = omega.mul_(signs.unsqueeze(-2))
    return fused.Formed(u, t, reciprocal, omega)


_large_truncated_gradient = in_full_precision(blocked.truncated_gradient)


class _Multiply(Function):
    @staticmethod
    @in_full_precision
    def forward(ctx, v, x, adjoint):
        if adjoint:
            u, t, reciprocal = _factors(v)
            y = u @ t
        elif tiers.choose(v).factors is Way.FUSED:
            u, t, reciprocal, y = fused.forward(v, "y")
        else:
            u, t, reciprocal = blocked.factors(v)
            y = u @ t.mT
        c = x @ y
        ctx.save_for_backward(v, u, t, reciprocal, x)
        ctx.set_materialize_grads(False)
        ctx.adjoint = adjoint
        return _minus_product(x, c, u.mT), u, t

    @staticmethod
    def backward(ctx, gy, gu, gt):
        *kept, x = ctx.saved_tensors
        saved = Saved(*kept)
        given = FactorGradients(gu, gt)
        needs_v, needs_x, _ = ctx.needs_input_grad
        needs = {"needs_v": needs_v, "needs_x": needs_x}
        if _needs_aten(gy, given):
            found = analytic.multiply_backward(saved, x, gy, given, ctx.adjoint, **needs)
        else:
            found = _multiply_gradient(saved, x, gy, ctx.adjoint, **needs)
        return found.v, found.x, None


def _minus_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return ``x - a @ b``, for matrices or batches of them."""
    if x.dim() == 2:
        return torch.addmm(x, a, b, alpha=-1)
    return torch.baddbmm(x, a, b, alpha=-1)


@in_full_precision
def _multiply_gradient(
    saved: Saved, x: Tensor, gy: Tensor, adjoint: bool, *, needs_v: bool, needs_x: bool
) -> MultiplyGradients:
    """Compute the gradients of v and x. g is the negative of the README's."""
    u = saved.u
    back = u @ saved.t
    forward = u @ saved.t.mT
    if adjoint:
        back, forward = forward, back
    g = gy @ back
    dx = None
    if needs_x:
        dx = _minus_product(gy, g, u.mT)
    if not needs_v:
        return MultiplyGradients(None, dx)
    c = x @ forward
    if adjoint:
        d = c.mT @ g
    else:
        d = g.mT @ c
    du = add_product_(gy.mT @ c, x.mT, g, -1, -1)
    return MultiplyGradients(blocked.factors_gradient(u, saved.reciprocal, du, d.triu_(1)), dx)


def _flat(x: Tensor) -> Tensor:
    """Return x with one batch dimension at most."""
    if x.dim() > 3:
        return x.flatten(0, -3)
    return x


def _kernel_signs(signs: Tensor | None, v: Tensor) -> Tensor | None:
    """Return signs as the kernels take them, or None if they can't or there are none."""
    if signs is None or signs.dtype != v.dtype or signs.requires_grad:
        return None
    if why_only_autograd(signs) is not None:
        return None
    return _flat_signs(signs)


def _by_one_launch(v: Tensor, signs: Tensor | None, plan: fused.Plan) -> Tensor:
    """Return a result, and keep what its gradient takes only if there will be one."""
    if v.requires_grad and torch.is_grad_enabled():
        return _apply_fused(v, signs, plan)
    return fused.result_only(plan, v, signs)


def _takes_one_launch(v: Tensor, signs: Tensor | None, wanted: fused.Result) -> bool:
    """Return whether one launch serves plain tensors like these, with the signs inside."""
    tier = tiers.choose(v)
    way = tier.factors
    if wanted == "matrix":
        way = tier.matrix
    if way is not Way.FUSED or v.dim() > 3:
        return False
    return signs is None or (signs.dtype == v.dtype and not signs.requires_grad)


def planned(
    v: Tensor, signs: Tensor | None, wanted: fused.Result
) -> Callable[[Tensor, Tensor | None], Tensor] | None:
    """Return a call for plain tensors like these, which asks nothing again, or None.

    Args:
        v, signs: as of :func:`cwy_matrix`. The backend can serve them.
        wanted: "matrix" or "truncated".
    """
    if not _takes_one_launch(v, signs, wanted):
        return None
    device = v.get_device()

    def call(v: Tensor, signs: Tensor | None) -> Tensor:
        if signs is not None:
            signs = signs.contiguous()
        return _by_one_launch(v, signs, fused.plan(v.shape, wanted, device))

    return call


def planned_passes(
    v: Tensor, signs: Tensor, wanted: fused.Result
) -> Callable[[Tensor, Tensor], tuple[Tensor, Backward]] | None:
    """Return a call as :func:`planned`, whose result comes with its backward pass."""
    if not _takes_one_launch(v, signs, wanted):
        return None
    device = v.get_device()

    def call(v: Tensor, signs: Tensor) -> tuple[Tensor, Backward]:
        plan = fused.plan(v.shape, wanted, device)
        signs = signs.contiguous()
        kept, result = fused.packed_forward(plan, v.contiguous(), signs)
        q = None
        if plan.forward.full_rank:
            q = result

        def pull_back(gradient: Tensor, kept: Tensor, q: Tensor | None, signs: Tensor) -> Tensor:
            return fused.packed_gradient(plan, kept, gradient, q, signs)

        return result, Backward(pull_back, (kept, q, signs))

    return call


def wy_factors(v: Tensor) -> tuple[Tensor, Tensor]:
    u, t = _Factors.apply(_flat(v))
    if v.dim() <= 3:
        return u, t
    return u.reshape(v.shape), t.unflatten(0, v.shape[:-2])


def cwy_matrix(v: Tensor, signs: Tensor | None = None) -> Tensor:
    flat = _flat(v)
    inside = _kernel_signs(signs, v)
    if tiers.choose(flat).matrix is Way.FUSED:
        q = _by_one_launch(flat, inside, fused.plan(flat.shape, "matrix", flat.get_device()))
    elif flat.shape[-1] >= flat.shape[-2]:
        q = _Wide.apply(flat, inside)
    else:
        q = _Narrow.apply(flat, inside)[0]
    if v.dim() > 3:
        q = q.unflatten(0, v.shape[:-2])
    if inside is None:
        return sign_columns(q, signs)
    return q


def tcwy_matrix(v: Tensor, signs: Tensor | None = None) -> Tensor:
    flat = _flat(v)
    inside = _kernel_signs(signs, v)
    if tiers.choose(flat).factors is Way.FUSED:
        plan = fused.plan(flat.shape, "truncated", flat.get_device())
        omega = _by_one_launch(flat, inside, plan)
    else:
        omega = _Truncated.apply(flat, inside)[0]
    if v.dim() > 3:
        omega = omega.reshape(v.shape)
    if inside is None:
        return sign_columns(omega, signs)
    return omega


def cwy_multiply(v: Tensor, x: Tensor, adjoint: bool) -> Tensor:
    y = _Multiply.apply(_flat(v), _flat(x), adjoint)[0]
    if x.dim() <= 3:
        return y
    return y.reshape(x.shape)


# The passes of the registered ops. They run without a graph, as in analytic.py.


def _with_batch(batch: torch.Size, *flat: Tensor) -> tuple[Tensor, ...]:
    """Return results of flattened matrices with the batch dimensions that these had."""
    if len(batch) <= 1:
        return flat
    return tuple(x.reshape(*batch, *x.shape[-2:]) for x in flat)


def _flat_signs(signs: Tensor | None) -> Tensor | None:
    if signs is None:
        return None
    if signs.dim() > 2:
        signs = signs.flatten(0, -2)
    return signs.contiguous()


def forward_factors(v: Tensor) -> tuple[Tensor, ...]:
    """Return U, T and the reciprocal norms."""
    return _with_batch(v.shape[:-2], *_factors(_flat(v)))


def backward_factors(
    u: Tensor, t: Tensor, reciprocal: Tensor, gu: Tensor | None, gt: Tensor | None
) -> Tensor | None:
    """Return the gradient of v."""
    flat = _flat(u)
    if tiers.choose(flat).factors is not Way.FUSED or gt is None:
        return analytic.backward_factors(u, t, reciprocal, gu, gt)
    if gu is not None:
        gu = _flat(gu)
    dv = fused.factors_gradient(flat, _flat(t), _flat(reciprocal), gu, _flat(gt))
    return dv.reshape(u.shape)


def forward_matrix(v: Tensor, signs: Tensor | None) -> tuple[Tensor, ...]:
    """Return Q with signs, U, a factor (Y if L >= N, else T) and the reciprocal norms."""
    flat = _flat(v)
    signs = _flat_signs(signs)
    tier = tiers.choose(flat)
    if tier.matrix is Way.FUSED:
        u, factor, reciprocal, q = fused.forward(flat, "matrix", signs)
        return _with_batch(v.shape[:-2], q, u, factor, reciprocal)
    large = _large_matrix(flat, signs, tier)
    factor = large.t
    if v.shape[-1] >= v.shape[-2]:
        factor = large.y
    return _with_batch(v.shape[:-2], large.q, large.u, factor, large.reciprocal)


def backward_matrix(
    z: Tensor, q: Tensor, u: Tensor, factor: Tensor, reciprocal: Tensor, signs: Tensor | None
) -> Tensor:
    """Return the gradient of v from that of Q, with what the forward pass returned."""
    shape = u.shape
    z, q, u, factor, reciprocal = (_flat(x) for x in (z, q, u, factor, reciprocal))
    signs = _flat_signs(signs)
    tier = tiers.choose(u)
    if u.shape[-1] >= u.shape[-2]:
        if tier.gradient is Way.FUSED:
            dv = fused.wide_gradient(u, factor, reciprocal, q, z, signs)
        else:
            dv = _large_wide_gradient(u, factor, reciprocal, q, z, signs, way=tier.gradient)
    elif tier.gradient is Way.FUSED:
        dv = fused.narrow_gradient(u, factor, reciprocal, z, signs)
    else:
        y = sign_rows_(_product(u, factor.mT), signs)
        dv = _large_narrow_gradient(u, factor, reciprocal, y, z, signs, tier=tier)
    return dv.reshape(shape)


_product = in_full_precision(torch.matmul)


def forward_truncated(v: Tensor, signs: Tensor | None) -> tuple[Tensor, ...]:
    """Return the first columns of Q, times signs, U, T and the reciprocal norms."""
    flat = _flat(v)
    signs = _flat_signs(signs)
    if tiers.choose(flat).factors is Way.FUSED:
        u, t, reciprocal, omega = fused.forward(flat, "truncated", signs)
    else:
        u, t, reciprocal, omega = _large_truncated(flat, signs)
    return _with_batch(v.shape[:-2], omega, u, t, reciprocal)


def backward_truncated(
    z: Tensor, u: Tensor, t: Tensor, reciprocal: Tensor, signs: Tensor | None
) -> Tensor:
    """Return the gradient of v from that of the first columns of Q."""
    shape = u.shape
    z, u, t, reciprocal = (_flat(x) for x in (z, u, t, reciprocal))
    signs = _flat_signs(signs)
    if tiers.choose(u).factors is Way.FUSED:
        dv = fused.truncated_gradient(u, t, reciprocal, z, signs)
    else:
        dv = _large_truncated_gradient(u, t, reciprocal, sign_columns(z, signs))
    return dv.reshape(shape)


@in_full_precision
def forward_multiply(v: Tensor, x: Tensor, adjoint: bool) -> tuple[Tensor, ...]:
    """Return the rows of x mapped by Q or its adjoint, U, T and the reciprocal norms."""
    rows = _flat(x)
    u, t, reciprocal = _factors(_flat(v))
    y = u @ t.mT
    if adjoint:
        y = u @ t
    moved = _minus_product(rows, rows @ y, u.mT)
    return moved.reshape(x.shape), *_with_batch(v.shape[:-2], u, t, reciprocal)


def backward_multiply(
    gy: Tensor, x: Tensor, u: Tensor, t: Tensor, reciprocal: Tensor, adjoint: bool
) -> tuple[Tensor, ...]:
    """Return the gradients of v and x."""
    flat = Saved(_flat(u), _flat(u), _flat(t), _flat(reciprocal))
    found = _multiply_gradient(flat, _flat(x), _flat(gy), adjoint, needs_v=True, needs_x=True)
    assert found.v is not None
    assert found.x is not None
    return found.v.reshape(u.shape), found.x.reshape(x.shape)
