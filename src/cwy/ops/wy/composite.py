"""The op in ATen operations alone: what compilers, forward-mode AD, ``vmap`` and double backward see."""

import torch
from torch import Tensor

from .._linalg import inverse, widen_if_cheap
from .._precision import in_full_precision, matmul


def largest_reciprocal(dtype: torch.dtype) -> float:
    """Return the bound of reciprocal norms in gradients, a power of two. A shorter vector has the gradient of one at the bound.

    Reciprocals of denormal norms are infinite. The bound leaves 16 powers of two for what they multiply.
    """
    return 2.0**-16 / torch.finfo(dtype).tiny


def normalise(v: Tensor) -> tuple[Tensor, Tensor]:
    r"""Unit columns $u_i = v_i/\lVert v_i\rVert$ and $1/\lVert v_i\rVert$; both 0 for a zero column.

    Each column is first scaled by a power of two, so that entries of 1e-30 and 1e30 neither vanish nor overflow.
    """
    if v.shape[-2] == 0:
        return v, v.real.new_zeros((*v.shape[:-2], 1, v.shape[-1]))
    largest = v.detach().abs().amax(-2, keepdim=True)
    # Denormal entries are lifted first: their power of two is no number.
    lift = torch.where(largest < 1, 2.0**64, 1.0)
    lifted = torch.where(largest > 0, largest, 1) * lift
    # mantissa / value is exactly the power of two that brings the value into [0.5, 1).
    power = torch.frexp(lifted).mantissa / lifted
    most = largest_reciprocal(largest.dtype)
    if not torch.is_grad_enabled():
        w = v * lift * power
        reciprocal = _reciprocal_norm(w)
        return w * reciprocal, (lift * power * reciprocal).clamp(max=most)
    w = v.detach() * lift * power
    scale = torch.minimum(lift * power, most / _reciprocal_norm(w))
    # The value is that of w, the derivative that of v * scale, in which the reciprocal norm has its bound.
    slope = v * scale
    w = w + (slope - slope.detach())
    reciprocal = _reciprocal_norm(w)
    return w * reciprocal, scale * reciprocal


def _reciprocal_norm(w: Tensor) -> Tensor:
    r"""$1/\lVert w_i\rVert$ of columns that need no scale: 0 for a zero column."""
    square = (
        (w * w.conj()).real.sum(-2, keepdim=True)
        if w.is_complex()
        else (w * w).sum(-2, keepdim=True)
    )
    zero = square == 0
    return torch.where(zero, 0, torch.where(zero, 1, square).rsqrt())


def s_matrix(u: Tensor) -> Tensor:
    r"""$S = \mathrm{striu}(U^H U) + \tfrac12\mathrm{diag}(\lVert u_i\rVert^2)$, in float64 where that is cheap."""
    u = widen_if_cheap(u)
    return s_from(matmul(u.mH, u))


def s_from(gram: Tensor) -> Tensor:
    r"""S from $U^H U$ on and above its diagonal, with ½ for a zero column.

    The diagonal is that of the U actually used, not a literal ½: this keeps Q orthogonal for any rounding of U.
    """
    square = gram.diagonal(dim1=-2, dim2=-1)
    # Not diagonal_scatter: of complex numbers, Inductor (torch 2.13) writes the diagonal after S was read.
    return gram.triu(1) + torch.diag_embed(torch.where(square == 0, 1, square) / 2)


def _eye_like(q: Tensor) -> Tensor:
    return torch.eye(q.shape[-2], q.shape[-1], dtype=q.dtype, device=q.device)


@in_full_precision
def wy_factors(v: Tensor) -> tuple[Tensor, Tensor]:
    u, _ = normalise(v)
    return u, inverse(s_matrix(u)).to(u.dtype)


@in_full_precision
def cwy_matrix(v: Tensor) -> Tensor:
    u, t = wy_factors(v)
    product = matmul(matmul(u, t), u.mH)
    return _eye_like(product) - product


@in_full_precision
def tcwy_matrix(v: Tensor) -> Tensor:
    u, t = wy_factors(v)
    product = matmul(u, matmul(t, u[..., : u.shape[-1], :].mH))
    return _eye_like(product) - product


@in_full_precision
def cwy_multiply(v: Tensor, x: Tensor, adjoint: bool) -> Tensor:
    u, t = wy_factors(v)
    return multiply_by_factors(u, t, x, adjoint)


@in_full_precision
def multiply_by_factors(u: Tensor, t: Tensor, x: Tensor, adjoint: bool) -> Tensor:
    """Rows of ``x (*, R, N)`` mapped by ``Q`` (or its adjoint) given as factors."""
    c = matmul(matmul(x, u.conj()), t.conj() if adjoint else t.mT)
    return x - matmul(c, u.mT)
