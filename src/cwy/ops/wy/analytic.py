r"""The op with an analytic backward pass, which needs fewer products and less memory than the tape.

The notation is that of the derivation in README.md: $W = UT$, $Y = UT^H$, $Z$ the gradient of the
output, $D$ the strict upper triangle of the gradient of S. Each function also returns its factors u
and t. The backward pass reads them, so a second derivative reaches v through their gradients.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ..._torch import dispatch_mode_count
from .._linalg import blocked_inverse, product, times, upper_product, widen_if_cheap
from .._precision import in_full_precision
from .composite import DOUBLE, normalize, s_from, scale_columns, sign_columns

# Columns whose cosines stay below this need no float64 in S. Its rounding is below that of Q.
_APART = 0.75
# Up to so many numbers float64 is as fast.
_FEW = 4096


class Saved(NamedTuple):
    """Hold what a forward pass keeps.

    Attributes:
        v: ``(*, N, L)``, the vectors.
        u: ``(*, N, L)``, the unit columns.
        t: ``(*, L, L)``.
        reciprocal: ``(*, 1, L)``, the reciprocal norms.
    """

    v: Tensor
    u: Tensor
    t: Tensor
    reciprocal: Tensor


class FactorGradients(NamedTuple):
    """Hold the gradients that u and t get from outside. None is zero."""

    u: Tensor | None
    t: Tensor | None


def _factors(v: Tensor) -> Saved:
    u, reciprocal = normalize(v)
    if u.dtype in DOUBLE:
        t = _t_in_double(u)
    else:
        t = blocked_inverse(_s_matrix(u)).to(u.dtype)
    return Saved(v, u, t, reciprocal)


def _t_in_double(u: Tensor) -> Tensor:
    """Return T of columns in double precision. There is no wider dtype for S."""
    s = s_from(upper_product(u, u))
    t = blocked_inverse(s)
    if _is_readable(u) and s.abs().max() <= _APART:
        return t
    return scale_columns(u, t)


def _s_matrix(u: Tensor) -> Tensor:
    """Return S of columns in single precision."""
    if _is_readable(u):
        s = s_from(upper_product(u, u))
        if s.abs().max() <= _APART:
            return s
    u = widen_if_cheap(u)
    return s_from(upper_product(u, u))


def _is_readable(u: Tensor) -> bool:
    """Return whether there are many numbers, on a CPU. There they are read without waiting."""
    return type(u) is Tensor and u.device.type == "cpu" and u.numel() > _FEW


def _eye_minus(product: Tensor) -> Tensor:
    """Return $I$ minus a product, in its place unless a mode may keep the product."""
    if dispatch_mode_count() == 0:
        out = product.neg_()
    else:
        out = product.neg()
    out.diagonal(dim1=-2, dim2=-1).add_(1)
    return out


def _form(saved: Saved) -> tuple[Tensor, Tensor]:
    """Return Q and $Y = UT^H$."""
    u = saved.u
    y = times(u, saved.t.mH, upper=False)
    if u.dtype in DOUBLE:
        return _eye_minus(_through_w(saved, u)), y
    return _eye_minus(u @ y.mH), y


def _through_w(saved: Saved, rows: Tensor) -> Tensor:
    """Return $WU^H$ with some rows of U. Columns of W have exact norms, those of Y have not."""
    return times(saved.u, saved.t) @ rows.mH


def _form_first_columns(saved: Saved) -> Tensor:
    """Return as many columns of Q as there are vectors."""
    u = saved.u
    top = u[..., : u.shape[-1], :]
    if u.dtype in DOUBLE:
        return _eye_minus(_through_w(saved, top))
    return _eye_minus(u @ (saved.t @ top.mH))


def _map_rows(saved: Saved, x: Tensor, adjoint: bool) -> Tensor:
    """Return the rows of x mapped by Q, or by its adjoint."""
    t = saved.t.mT
    if adjoint:
        t = saved.t.conj()
    c = (x @ saved.u.conj()) @ t
    return x - c @ saved.u.mT


def _plus(a: Tensor | None, b: Tensor) -> Tensor:
    """Return a + b, in the place of b if no second derivative is asked for."""
    if a is None:
        return b
    if torch.is_grad_enabled():
        return a + b
    return b.add_(a)


def _pull_back(
    saved: Saved, du: Tensor | None, d: Tensor | None, given: FactorGradients
) -> Tensor | None:
    """Compute the gradient of v from those of u (``du``), of S (``d``) and of the factors."""
    u = saved.u
    if given.t is not None:
        back = saved.t.mH
        d = _plus(d, -product(product(back, given.t), back).triu(1))
    if d is not None:
        du = _plus(du, product(u, d + d.mH))
    if du is None:
        du = given.u
    elif given.u is not None:
        du = du + given.u
    if du is None:
        return None
    along = (u.conj() * du).sum(-2, keepdim=True)
    if along.is_complex():
        along = along.real
    if torch.is_grad_enabled():
        # The saved norms are constants. A second derivative needs them as functions of v.
        return (du - u * along) * normalize(saved.v)[1]
    return torch.addcmul(du, u, along.to(u.dtype), value=-1).mul_(saved.reciprocal)


class _Factors(Function):
    @staticmethod
    @in_full_precision
    def forward(ctx, v):
        saved = _factors(v)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return saved.u, saved.t

    @staticmethod
    def backward(ctx, gu, gt):
        return factors_backward(Saved(*ctx.saved_tensors), FactorGradients(gu, gt))


@in_full_precision
def factors_backward(saved: Saved, given: FactorGradients) -> Tensor | None:
    """Compute the gradient of v from those of the factors."""
    return _pull_back(saved, None, None, given)


class _Matrix(Function):
    @staticmethod
    @in_full_precision
    def forward(ctx, v):
        saved = _factors(v)
        u = saved.u
        q, y = _form(saved)
        kept = None
        if u.shape[-1] >= u.shape[-2]:
            kept = q
        ctx.save_for_backward(*saved, kept, y)
        ctx.set_materialize_grads(False)
        return q, u, saved.t

    @staticmethod
    def backward(ctx, z, gu, gt):
        *saved, q, y = ctx.saved_tensors
        return matrix_backward(Saved(*saved), q, z, FactorGradients(gu, gt), y)


@in_full_precision
def matrix_backward(
    saved: Saved,
    q: Tensor | None,
    z: Tensor | None,
    given: FactorGradients,
    y: Tensor | None = None,
) -> Tensor | None:
    """Compute the gradient of v from that of a matrix.

    Args:
        saved: what the forward pass kept.
        q: the matrix, if L >= N.
        z: its gradient.
        given: the gradients of the factors.
        y: U T^H, if it was kept.
    """
    if z is None:
        return _pull_back(saved, None, None, given)
    if y is None or torch.is_grad_enabled():  # a saved y is a constant
        y = times(saved.u, saved.t.mH, upper=False)
    if saved.u.shape[-1] < saved.u.shape[-2]:
        return _narrow_backward(saved, y, z, given)
    assert q is not None
    return _wide_backward(saved, y, q, z, given)


def _narrow_backward(saved: Saved, y: Tensor, z: Tensor, given: FactorGradients) -> Tensor | None:
    w = times(saved.u, saved.t)
    a = product(z, y)
    return _pull_back(saved, -a - product(z.mH, w), upper_product(w, a).triu(1), given)


def _wide_backward(
    saved: Saved, y: Tensor, q: Tensor, z: Tensor, given: FactorGradients
) -> Tensor | None:
    """Compute it for L >= N, where one product with Q finds the tangent part of z.

    X is twice the README's, and K is $2K^H$.
    """
    omega = product(q.mH, z)
    x = product(omega - omega.mH, y)
    k = upper_product(x, y)
    low = k.triu(1)
    if k.is_complex():  # the diagonal of a real skew-symmetric matrix is zero
        low = low + torch.diag_embed(k.diagonal(dim1=-2, dim2=-1) / 2)
    du = times(saved.u, low.mH, upper=False)
    if torch.is_grad_enabled():
        du = du - x
    else:
        du = du.sub_(x)
    return _pull_back(saved, du, None, given)


class _Truncated(Function):
    @staticmethod
    @in_full_precision
    def forward(ctx, v):
        saved = _factors(v)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        return _form_first_columns(saved), saved.u, saved.t

    @staticmethod
    def backward(ctx, z, gu, gt):
        return truncated_backward(Saved(*ctx.saved_tensors), z, FactorGradients(gu, gt))


@in_full_precision
def truncated_backward(saved: Saved, z: Tensor | None, given: FactorGradients) -> Tensor | None:
    """Compute the gradient of v from that of the first columns of a matrix."""
    if z is None:
        return _pull_back(saved, None, None, given)
    u = saved.u
    m = u.shape[-1]
    c = product(u.mH, z)
    y1 = product(u[..., :m, :], saved.t.mH)
    du = -product(z, y1)
    top = product(c.mH, saved.t)
    if torch.is_grad_enabled():
        du = du - torch.nn.functional.pad(top, (0, 0, 0, u.shape[-2] - m))
    else:
        du.narrow(-2, 0, m).sub_(top)
    d = product(product(saved.t.mH, c), y1).triu(1)
    return _pull_back(saved, du, d, given)


class _Multiply(Function):
    @staticmethod
    @in_full_precision
    def forward(ctx, v, x, adjoint):
        saved = _factors(v)
        ctx.save_for_backward(*saved, x)
        ctx.set_materialize_grads(False)
        ctx.adjoint = adjoint
        return _map_rows(saved, x, adjoint), saved.u, saved.t

    @staticmethod
    def backward(ctx, gy, gu, gt):
        *saved, x = ctx.saved_tensors
        given = FactorGradients(gu, gt)
        needs_v, needs_x, _ = ctx.needs_input_grad
        gradients = multiply_backward(
            Saved(*saved), x, gy, given, ctx.adjoint, needs_v=needs_v, needs_x=needs_x
        )
        return gradients.v, gradients.x, None


class MultiplyGradients(NamedTuple):
    """Hold the gradients of a multiplication. None was not needed."""

    v: Tensor | None
    x: Tensor | None


@in_full_precision
def multiply_backward(
    saved: Saved,
    x: Tensor,
    gy: Tensor | None,
    given: FactorGradients,
    adjoint: bool,
    *,
    needs_v: bool,
    needs_x: bool,
) -> MultiplyGradients:
    """Compute the gradients of v and x from that of the product, ``gy``."""
    if gy is None:
        return MultiplyGradients(_pull_back(saved, None, None, given), None)
    u = saved.u
    forward = saved.t.mT
    back = saved.t.conj()
    if adjoint:
        forward, back = back, forward
    g = -product(product(gy, u.conj()), back)
    dx = None
    if needs_x:
        dx = gy + product(g, u.mT)
    if not needs_v:
        return MultiplyGradients(None, dx)
    c = product(product(x, u.conj()), forward)
    if adjoint:
        d = product(c.mT, g.conj())
    else:
        d = product(g.mT, c.conj())
    du = product(x.mT, g.conj()) - product(gy.mT, c.conj())
    return MultiplyGradients(_pull_back(saved, du, -d.triu(1), given), dx)


def wy_factors(v: Tensor) -> tuple[Tensor, Tensor]:
    return _Factors.apply(v)


def cwy_matrix(v: Tensor, signs: Tensor | None = None) -> Tensor:
    return sign_columns(_Matrix.apply(v)[0], signs)


def tcwy_matrix(v: Tensor, signs: Tensor | None = None) -> Tensor:
    return sign_columns(_Truncated.apply(v)[0], signs)


def cwy_multiply(v: Tensor, x: Tensor, adjoint: bool) -> Tensor:
    return _Multiply.apply(v, x, adjoint)[0]


# The passes of the registered ops. They run without a graph. Only a second derivative reads the
# vectors, so the unit columns stand in their place: Saved(u, u, ...).

_NO_GRADIENTS = FactorGradients(None, None)


def forward_factors(v: Tensor) -> tuple[Tensor, ...]:
    """Return U, T and the reciprocal norms."""
    saved = _factors(v)
    return saved.u, saved.t, saved.reciprocal


def backward_factors(
    u: Tensor, t: Tensor, reciprocal: Tensor, gu: Tensor | None, gt: Tensor | None
) -> Tensor | None:
    """Return the gradient of v."""
    return factors_backward(Saved(u, u, t, reciprocal), FactorGradients(gu, gt))


def forward_matrix(v: Tensor, signs: Tensor | None) -> tuple[Tensor, ...]:
    """Return Q with signs, U, a factor (Y if L >= N, else T) and the reciprocal norms."""
    saved = _factors(v)
    u = saved.u
    q, y = _form(saved)
    q = sign_columns(q, signs)
    if u.shape[-1] >= u.shape[-2]:
        return q, u, y, saved.reciprocal
    return q, u, saved.t, saved.reciprocal


def backward_matrix(
    z: Tensor, q: Tensor, u: Tensor, factor: Tensor, reciprocal: Tensor, signs: Tensor | None
) -> Tensor | None:
    """Return the gradient of v from that of Q, with what the forward pass returned."""
    if signs is not None:
        signs = signs.conj()
    z = sign_columns(z, signs)
    saved = Saved(u, u, factor, reciprocal)
    if u.shape[-1] < u.shape[-2]:
        return matrix_backward(saved, None, z, _NO_GRADIENTS)
    # The factor is Y here, and T is not read.
    return matrix_backward(saved, sign_columns(q, signs), z, _NO_GRADIENTS, factor)


def forward_truncated(v: Tensor, signs: Tensor | None) -> tuple[Tensor, ...]:
    """Return the first columns of Q, times signs, U, T and the reciprocal norms."""
    saved = _factors(v)
    omega = sign_columns(_form_first_columns(saved), signs)
    return omega, saved.u, saved.t, saved.reciprocal


def backward_truncated(
    z: Tensor, u: Tensor, t: Tensor, reciprocal: Tensor, signs: Tensor | None
) -> Tensor | None:
    """Return the gradient of v from that of the first columns of Q."""
    if signs is not None:
        z = sign_columns(z, signs.conj())
    return truncated_backward(Saved(u, u, t, reciprocal), z, _NO_GRADIENTS)


def forward_multiply(v: Tensor, x: Tensor, adjoint: bool) -> tuple[Tensor, ...]:
    """Return the rows of x mapped by Q or its adjoint, U, T and the reciprocal norms."""
    saved = _factors(v)
    return _map_rows(saved, x, adjoint), saved.u, saved.t, saved.reciprocal


def backward_multiply(
    gy: Tensor, x: Tensor, u: Tensor, t: Tensor, reciprocal: Tensor, adjoint: bool
) -> MultiplyGradients:
    """Return the gradients of v and x."""
    saved = Saved(u, u, t, reciprocal)
    return multiply_backward(saved, x, gy, _NO_GRADIENTS, adjoint, needs_v=True, needs_x=True)
