r"""The op with its backward written by hand: fewer products than the tape, and none of its memory.

Notation of the derivation in README.md: $W = UT$, $Y = UT^H$, $Z$ the gradient of the output, $D$ the strict
upper triangle of the gradient of S. Each function also returns its factors u and t: the backward reads them,
so a second derivative reaches v through their gradients.
"""

import torch
from torch import Tensor
from torch.autograd import Function

from .._linalg import blocked_inverse, times, upper_product, widen_if_cheap
from .._precision import in_full_precision, product
from .composite import normalise, s_from

# Columns whose cosines stay below this need no float64 in S: measured, its rounding is then lost in that of Q.
_APART = 0.75
_FEW = 4096  # numbers for which float64 is as fast


def _factors(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, reciprocal = normalise(v)
    return u, blocked_inverse(_s_matrix(u)).to(u.dtype), reciprocal


def _s_matrix(u: Tensor) -> Tensor:
    # Only a CPU may look at values without waiting for them.
    if type(u) is Tensor and u.device.type == "cpu" and u.numel() > _FEW:
        s = s_from(upper_product(u, u))
        if s.abs().max() <= _APART:
            return s
    u = widen_if_cheap(u)
    return s_from(upper_product(u, u))


def _eye_minus_(product: Tensor) -> Tensor:
    product.neg_().diagonal(dim1=-2, dim2=-1).add_(1)
    return product


def _plus(a: Tensor | None, b: Tensor) -> Tensor:
    """a + b, into b if no second derivative is asked for."""
    if a is None:
        return b
    return a + b if torch.is_grad_enabled() else b.add_(a)


def _pull_back(
    v: Tensor,
    u: Tensor,
    t: Tensor,
    reciprocal: Tensor,
    du: Tensor | None,
    d: Tensor | None,
    gu: Tensor | None,
    gt: Tensor | None,
) -> Tensor | None:
    """The gradient of v from those of u (``du``, ``gu``), of S (``d``) and of t (``gt``)."""
    if gt is not None:
        d = _plus(d, -product(product(t.mH, gt), t.mH).triu(1))
    if d is not None:
        du = _plus(du, product(u, d + d.mH))
    if gu is not None:
        du = gu if du is None else du + gu
    if du is None:
        return None
    along = (u.conj() * du).sum(-2, keepdim=True)
    along = along.real if along.is_complex() else along
    if torch.is_grad_enabled():
        # The norms saved by the forward pass are constants; a second derivative needs them as functions of v.
        return (du - u * along) * normalise(v)[1]
    return torch.addcmul(du, u, along.to(u.dtype), value=-1).mul_(reciprocal)


class _Factors(Function):
    @staticmethod
    @in_full_precision
    def forward(ctx, v):
        u, t, reciprocal = _factors(v)
        ctx.save_for_backward(v, u, t, reciprocal)
        ctx.set_materialize_grads(False)
        return u, t

    @staticmethod
    def backward(ctx, gu, gt):
        v, u, t, reciprocal = ctx.saved_tensors
        return _factors_backward(v, u, t, reciprocal, gu, gt)


@in_full_precision
def _factors_backward(v, u, t, reciprocal, gu, gt):
    return _pull_back(v, u, t, reciprocal, None, None, gu, gt)


class _Matrix(Function):
    @staticmethod
    @in_full_precision
    def forward(ctx, v):
        u, t, reciprocal = _factors(v)
        y = times(u, t.mH, upper=False)
        q = _eye_minus_(u @ y.mH)
        ctx.save_for_backward(v, u, t, reciprocal, q if u.shape[-1] >= u.shape[-2] else None, y)
        ctx.set_materialize_grads(False)
        return q, u, t

    @staticmethod
    def backward(ctx, z, gu, gt):
        v, u, t, reciprocal, q, y = ctx.saved_tensors
        return _matrix_backward(v, u, t, reciprocal, q, z, gu, gt, y)


@in_full_precision
def _matrix_backward(v, u, t, reciprocal, q, z, gu, gt, y=None):
    if z is None:
        return _pull_back(v, u, t, reciprocal, None, None, gu, gt)
    if y is None or torch.is_grad_enabled():  # what the forward pass saved is a constant
        y = times(u, t.mH, upper=False)
    if u.shape[-1] < u.shape[-2]:
        w = times(u, t)
        a = product(z, y)
        return _pull_back(
            v, u, t, reciprocal, -a - product(z.mH, w), upper_product(w, a).triu(1), gu, gt
        )
    # L >= N: only the tangent part of z matters, and one product with Q finds it. X is twice the README's, K 2K^H.
    omega = product(q.mH, z)
    x = product(omega - omega.mH, y)
    k = upper_product(x, y)
    low = k.triu(1)
    if k.is_complex():
        low = low + torch.diag_embed(
            k.diagonal(dim1=-2, dim2=-1) / 2
        )  # of a real skew-symmetric matrix it is zero
    du = times(u, low.mH, upper=False)
    return _pull_back(
        v, u, t, reciprocal, du - x if torch.is_grad_enabled() else du.sub_(x), None, gu, gt
    )


class _Truncated(Function):
    @staticmethod
    @in_full_precision
    def forward(ctx, v):
        u, t, reciprocal = _factors(v)
        m = u.shape[-1]
        omega = _eye_minus_(u @ (t @ u[..., :m, :].mH))
        ctx.save_for_backward(v, u, t, reciprocal)
        ctx.set_materialize_grads(False)
        return omega, u, t

    @staticmethod
    def backward(ctx, z, gu, gt):
        v, u, t, reciprocal = ctx.saved_tensors
        return _truncated_backward(v, u, t, reciprocal, z, gu, gt)


@in_full_precision
def _truncated_backward(v, u, t, reciprocal, z, gu, gt):
    if z is None:
        return _pull_back(v, u, t, reciprocal, None, None, gu, gt)
    m = u.shape[-1]
    c = product(u.mH, z)
    y1 = product(u[..., :m, :], t.mH)
    du = -product(z, y1)
    top = product(c.mH, t)
    if torch.is_grad_enabled():
        du = du - torch.nn.functional.pad(top, (0, 0, 0, u.shape[-2] - m))
    else:
        du.narrow(-2, 0, m).sub_(top)
    return _pull_back(v, u, t, reciprocal, du, product(product(t.mH, c), y1).triu(1), gu, gt)


class _Multiply(Function):
    @staticmethod
    @in_full_precision
    def forward(ctx, v, x, adjoint):
        u, t, reciprocal = _factors(v)
        c = (x @ u.conj()) @ (t.conj() if adjoint else t.mT)
        ctx.save_for_backward(v, u, t, reciprocal, x)
        ctx.set_materialize_grads(False)
        ctx.adjoint = adjoint
        return x - c @ u.mT, u, t

    @staticmethod
    def backward(ctx, gy, gu, gt):
        v, u, t, reciprocal, x = ctx.saved_tensors
        return *_multiply_backward(
            v, u, t, reciprocal, x, gy, gu, gt, ctx.adjoint, ctx.needs_input_grad
        ), None


@in_full_precision
def _multiply_backward(v, u, t, reciprocal, x, gy, gu, gt, adjoint, needs):
    if gy is None:
        return _pull_back(v, u, t, reciprocal, None, None, gu, gt), None
    forward, back = (t.conj(), t.mT) if adjoint else (t.mT, t.conj())
    g = -product(product(gy, u.conj()), back)
    dx = gy + product(g, u.mT) if needs[1] else None
    if not needs[0]:
        return None, dx
    c = product(product(x, u.conj()), forward)
    d = product(c.mT, g.conj()) if adjoint else product(g.mT, c.conj())
    du = product(x.mT, g.conj()) - product(gy.mT, c.conj())
    return _pull_back(v, u, t, reciprocal, du, -d.triu(1), gu, gt), dx


def wy_factors(v: Tensor) -> tuple[Tensor, Tensor]:
    return _Factors.apply(v)


def cwy_matrix(v: Tensor) -> Tensor:
    return _Matrix.apply(v)[0]


def tcwy_matrix(v: Tensor) -> Tensor:
    return _Truncated.apply(v)[0]


def cwy_multiply(v: Tensor, x: Tensor, adjoint: bool) -> Tensor:
    return _Multiply.apply(v, x, adjoint)[0]
