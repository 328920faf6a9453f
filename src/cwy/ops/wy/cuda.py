"""The op by kernels, float32 on an NVIDIA GPU: a few launches from vectors to Q, and from its gradient to theirs.

Small and thin problems run in one launch (:mod:`.fused`), large ones by products (:mod:`.blocked`, :mod:`.halves`). A second
derivative is :mod:`.autograd`'s.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..._torch import dispatch_mode_count, has_storage
from .. import _nvrtc
from .._precision import in_full_precision
from ..dispatch import why_only_aten
from . import autograd, blocked, fused, halves
from .blocked import eye_minus, plus_, signed_

SMALL, THIN = 512, 256  # the most of N and L, and of L alone, for one launch
ENTRIES, FORMED = (
    2**18,
    2**22,
)  # the most entries of v, and of Q, for one launch that forms a thin one's Q, too
WORK = 2**26  # products in float64 that a GPU without fast ones does in the time of some launches


def why_not(*tensors: Tensor) -> str | None:
    """Why the kernels can't serve, or None if they can."""
    if traced := why_only_aten(*tensors):
        return traced
    v, reasons = tensors[0], []
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


def why_pass(*tensors: Tensor) -> str | None:
    """Why another is the better choice: much work in float64, on a GPU that has little of it."""
    v = tensors[0]
    if v.is_cuda and v.numel() * v.shape[-1] > WORK and not blocked.doubles(v.get_device()):
        return "it adds up in float64, which is slow on this GPU"
    return None


@functools.cache
def _capable(device: int) -> bool:
    return not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)


def _small(v: Tensor) -> bool:
    n, size = v.shape[-2:]
    return max(n, size) <= SMALL or (
        size <= THIN and v.numel() <= ENTRIES and v.numel() // size * n <= FORMED
    )


def _thin(v: Tensor) -> bool:
    return v.shape[-1] <= THIN or _small(v)


def _beyond(z: Tensor | None, gu: Tensor | None = None, gt: Tensor | None = None) -> bool:
    """Whether a backward must be of ATen ops: to be differentiated again, or if factors were used, or for many z."""
    return (
        z is None
        or gu is not None
        or gt is not None
        or torch.is_grad_enabled()
        or why_not(z) is not None
    )


def _signed(x: Any, signs: Tensor | None) -> Any:
    """x, if there is one, with its columns times signs."""
    return x if x is None or signs is None else x * signs.unsqueeze(-2)


def _factors(v: Tensor) -> tuple[Tensor, ...]:
    return fused.forward(v, "factors") if _thin(v) else _large_factors(v)


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
        v, u, t, reciprocal = ctx.saved_tensors
        if not _thin(u) or _beyond(gt) or (gu is not None and why_not(gu) is not None):
            return autograd._factors_backward(v, u, t, reciprocal, gu, gt)
        return fused.backward(fused.FACTORS, u, t, reciprocal, given=(None, gu, gt))


class _Wide(Function):
    """Matrices with L >= N, whose gradient takes no T."""

    @staticmethod
    def forward(ctx, v, signs):
        u, y, reciprocal, q = (
            fused.forward(v, "matrix", signs=signs) if _small(v) else _large_wide(v, signs)
        )
        ctx.save_for_backward(v, u, y, reciprocal, q, signs)
        return q

    @staticmethod
    def backward(ctx, z):
        v, u, y, reciprocal, q, signs = ctx.saved_tensors
        if _beyond(z):
            u, t = _Factors.apply(v)
            return autograd._matrix_backward(
                v, u, t, reciprocal, _signed(q, signs), _signed(z, signs), None, None
            ), None
        if _small(u):
            return fused.backward(fused.WIDE, u, y, reciprocal, z, q, signs=signs), None
        return _large_wide_gradient(u, y, reciprocal, q, z, signs), None


class _Matrix(Function):
    @staticmethod
    def forward(ctx, v, signs):
        u, t, reciprocal, q, y = (
            (*fused.forward(v, "matrix", signs=signs), None)
            if _small(v)
            else _large_matrix(v, signs)
        )
        ctx.save_for_backward(v, u, t, reciprocal, y, signs)
        ctx.set_materialize_grads(False)
        return q, u, t

    @staticmethod
    def backward(ctx, z, gu, gt):
        v, u, t, reciprocal, y, signs = ctx.saved_tensors
        if _beyond(z, gu, gt):
            return autograd._matrix_backward(
                v, u, t, reciprocal, None, _signed(z, signs), gu, gt
            ), None
        if _small(u):
            return fused.backward(fused.NARROW, u, t, reciprocal, z, signs=signs), None
        return _large_gradient(u, t, reciprocal, y, z, signs), None


@in_full_precision
def _large_matrix(v: Tensor, signs: Tensor | None) -> tuple[Tensor, ...]:
    """u, t, the reciprocal norms, and Q and Y times signs: the columns of one, the rows of the other."""
    if not _thin(v):
        u, t, reciprocal = blocked.factors(v)
        return u, t, reciprocal, *(halves if halves.serves(v) else blocked).matrix(u, t, signs)
    u, t, reciprocal, y = fused.forward(v, "y")
    y, diagonal = signed_(y, signs), 1 if signs is None else signs
    return (
        u,
        t,
        reciprocal,
        halves.eye_minus(u, y, diagonal) if halves.serves_thin(u) else eye_minus(u, y.mT, diagonal),
        y,
    )


def _large_wide(v: Tensor, signs: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    u, _, reciprocal, q, y = _large_matrix(v, signs)
    return u, y, reciprocal, q


@in_full_precision
def _large_wide_gradient(
    u: Tensor, y: Tensor, reciprocal: Tensor, q: Tensor, z: Tensor, signs: Tensor | None
) -> Tensor:
    return (halves if halves.serves(u) else blocked).wide_gradient(u, y, reciprocal, q, z, signs)


@in_full_precision
def _large_gradient(
    u: Tensor, t: Tensor, reciprocal: Tensor, y: Tensor, z: Tensor, signs: Tensor | None
) -> Tensor:
    if not _thin(u):
        return (halves if halves.serves(u) else blocked).narrow_gradient(
            u, t, reciprocal, y, z, signs
        )
    w = u @ t
    return fused.backward(
        fused.ENDING, u, t, reciprocal, given=(w, z @ y, signed_(z.mT @ w, signs))
    )


class _Truncated(Function):
    @staticmethod
    def forward(ctx, v, signs):
        u, t, reciprocal, omega = (
            fused.forward(v, "truncated", signs=signs) if _thin(v) else _large_truncated(v, signs)
        )
        ctx.save_for_backward(v, u, t, reciprocal, signs)
        ctx.set_materialize_grads(False)
        return omega, u, t

    @staticmethod
    def backward(ctx, z, gu, gt):
        v, u, t, reciprocal, signs = ctx.saved_tensors
        if _beyond(z, gu, gt):
            return autograd._truncated_backward(
                v, u, t, reciprocal, _signed(z, signs), gu, gt
            ), None
        if _thin(u):
            return fused.backward(fused.TRUNCATED, u, t, reciprocal, z, signs=signs), None
        return _large_truncated_gradient(u, t, reciprocal, _signed(z, signs)), None


@in_full_precision
def _large_truncated(v: Tensor, signs: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    u, t, reciprocal = blocked.factors(v)
    omega = eye_minus(u, t @ u[..., : u.shape[-1], :].mT)
    return u, t, reciprocal, omega if signs is None else omega.mul_(signs.unsqueeze(-2))


_large_truncated_gradient = in_full_precision(blocked.truncated_gradient)


class _Multiply(Function):
    @staticmethod
    @in_full_precision
    def forward(ctx, v, x, adjoint):
        if adjoint or not _thin(v):
            u, t, reciprocal = _factors(v)
            y = u @ (t if adjoint else t.mT)
        else:
            u, t, reciprocal, y = fused.forward(v, "y")
        c = x @ y
        ctx.save_for_backward(v, u, t, reciprocal, x)
        ctx.set_materialize_grads(False)
        ctx.adjoint = adjoint
        return (torch.addmm if x.dim() == 2 else torch.baddbmm)(x, c, u.mT, alpha=-1), u, t

    @staticmethod
    def backward(ctx, gy, gu, gt):
        v, u, t, reciprocal, x = ctx.saved_tensors
        if _beyond(gy, gu, gt):
            return *autograd._multiply_backward(
                v, u, t, reciprocal, x, gy, gu, gt, ctx.adjoint, ctx.needs_input_grad
            ), None
        return *_multiply_gradient(gy, u, t, reciprocal, x, ctx.adjoint, ctx.needs_input_grad), None


@in_full_precision
def _multiply_gradient(gy, u, t, reciprocal, x, adjoint, needs):
    """With g the negative of the README's."""
    w, y = u @ t, u @ t.mT
    g = gy @ (y if adjoint else w)
    dx = (
        (torch.addmm if gy.dim() == 2 else torch.baddbmm)(gy, g, u.mT, alpha=-1)
        if needs[1]
        else None
    )
    if not needs[0]:
        return None, dx
    c = x @ (w if adjoint else y)
    d = (c.mT @ g if adjoint else g.mT @ c).triu_(1)
    du = plus_(gy.mT @ c, x.mT, g, -1, -1)
    return blocked.factors_gradient(u, reciprocal, du, d), dx


def _flat(x: Tensor) -> Tensor:
    return x.flatten(0, -3) if x.dim() > 3 else x


def _rows(signs: Tensor | None) -> Tensor | None:
    return (
        None
        if signs is None
        else signs.flatten(0, -2).contiguous()
        if signs.dim() > 2
        else signs.contiguous()
    )


def wy_factors(v: Tensor) -> tuple[Tensor, Tensor]:
    u, t = _Factors.apply(_flat(v))
    return (u, t) if v.dim() <= 3 else (u.reshape(v.shape), t.unflatten(0, v.shape[:-2]))


def cwy_matrix(v: Tensor, signs: Tensor | None = None) -> Tensor:
    flat, signs = _flat(v), _rows(signs)
    if _small(flat) and not (flat.requires_grad and torch.is_grad_enabled()):
        (q,) = fused.forward(flat, "matrix", keep=False, signs=signs)
    elif flat.shape[-1] >= flat.shape[-2]:
        q = _Wide.apply(flat, signs)
    else:
        q = _Matrix.apply(flat, signs)[0]
    return q if v.dim() <= 3 else q.unflatten(0, v.shape[:-2])


def tcwy_matrix(v: Tensor, signs: Tensor | None = None) -> Tensor:
    flat, signs = _flat(v), _rows(signs)
    if _thin(flat) and not (flat.requires_grad and torch.is_grad_enabled()):
        (omega,) = fused.forward(flat, "truncated", keep=False, signs=signs)
    else:
        omega = _Truncated.apply(flat, signs)[0]
    return omega if v.dim() <= 3 else omega.reshape(v.shape)


def cwy_multiply(v: Tensor, x: Tensor, adjoint: bool) -> Tensor:
    y = _Multiply.apply(_flat(v), _flat(x), adjoint)[0]
    return y if x.dim() <= 3 else y.reshape(x.shape)
