"""The op in ATen operations only, for compilers, forward-mode AD, ``vmap`` and double backward."""

import torch
from torch import Tensor

from .._linalg import inverse, matmul, widen_if_cheap
from .._precision import in_full_precision

DOUBLE = (torch.float64, torch.complex128)
"""The dtypes for which S has no wider one."""


def largest_reciprocal(dtype: torch.dtype) -> float:
    """Return the bound of reciprocal norms in gradients, a power of two.

    Reciprocals of denormal norms are infinite. The bound leaves room for products.
    """
    return 2.0**-16 / torch.finfo(dtype).tiny


def normalize(v: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return columns $u_i = v_i/\lVert v_i\rVert$ and $1/\lVert v_i\rVert$, 0 for a zero column.

    Each column is first scaled by a power of two, so that entries of 1e-30 and 1e30 neither vanish
    nor overflow.
    """
    if v.shape[-2] == 0:
        # A copy, because no op may return its argument.
        return v.clone(), v.real.new_zeros((*v.shape[:-2], 1, v.shape[-1]))
    largest = v.detach().abs().amax(-2, keepdim=True)
    # Denormal entries are lifted first, because their power of two overflows.
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
    # The value is that of w. The derivative is that of v * scale, whose reciprocal norm is bounded.
    slope = v * scale
    w = w + (slope - slope.detach())
    reciprocal = _reciprocal_norm(w)
    return w * reciprocal, scale * reciprocal


def _reciprocal_norm(w: Tensor) -> Tensor:
    r"""Return $1/\lVert w_i\rVert$ of scaled columns, 0 for a zero column."""
    square = _square(w)
    zero = square == 0
    return torch.where(zero, 0, torch.where(zero, 1, square).rsqrt())


def s_matrix(u: Tensor) -> Tensor:
    r"""Compute $S = \mathrm{striu}(U^H U) + \tfrac12\mathrm{diag}(\lVert u_i\rVert^2)$.

    It is in float64 where that is cheap.
    """
    u = widen_if_cheap(u)
    return s_from(matmul(u.mH, u))


def s_from(gram: Tensor) -> Tensor:
    r"""Return S from the upper triangle of $U^H U$, with ½ for a zero column.

    The diagonal is that of the U actually used, not a literal ½. This keeps Q orthogonal for any
    rounding of U.
    """
    square = gram.diagonal(dim1=-2, dim2=-1)
    # With diagonal_scatter Inductor (torch 2.13) writes a complex diagonal after S was read.
    return gram.triu(1) + torch.diag_embed(torch.where(square == 0, 1, square) / 2)


def scale_columns(u: Tensor, t: Tensor) -> Tensor:
    r"""Return T with scaled columns, so that those of $UT$ have norm $2/\lVert u_j\rVert$.

    They have it but for rounding. For nearly parallel vectors the error of T is along the columns,
    and this removes most of it. In single precision S is wider than T, so there it is not needed.
    The factors are so near 1 that derivatives leave them out.
    """
    u = u.detach()
    w = matmul(u, t.detach())
    square = _square(w / 2) * _square(u)
    zero = square == 0
    return t * torch.where(zero, 1, square).rsqrt()


def _square(w: Tensor) -> Tensor:
    """Return the squared norms of columns."""
    if w.is_complex():
        return (w * w.conj()).real.sum(-2, keepdim=True)
    return (w * w).sum(-2, keepdim=True)


def _eye_like(q: Tensor) -> Tensor:
    return torch.eye(q.shape[-2], q.shape[-1], dtype=q.dtype, device=q.device)


@in_full_precision
def wy_factors(v: Tensor) -> tuple[Tensor, Tensor]:
    u, _ = normalize(v)
    t = inverse(s_matrix(u)).to(u.dtype)
    if u.dtype in DOUBLE:
        t = scale_columns(u, t)
    return u, t


@in_full_precision
def cwy_matrix(v: Tensor, signs: Tensor | None = None) -> Tensor:
    u, t = wy_factors(v)
    product = matmul(matmul(u, t), u.mH)
    return sign_columns(_eye_like(product) - product, signs)


@in_full_precision
def tcwy_matrix(v: Tensor, signs: Tensor | None = None) -> Tensor:
    u, t = wy_factors(v)
    product = matmul(u, matmul(t, u[..., : u.shape[-1], :].mH))
    return sign_columns(_eye_like(product) - product, signs)


def sign_columns(q: Tensor, signs: Tensor | None) -> Tensor:
    """Return q with its columns times signs, if there are any."""
    if signs is None:
        return q
    return q * signs.unsqueeze(-2)


@in_full_precision
def cwy_multiply(v: Tensor, x: Tensor, adjoint: bool) -> Tensor:
    u, t = wy_factors(v)
    return multiply_by_factors(u, t, x, adjoint)


@in_full_precision
def multiply_by_factors(u: Tensor, t: Tensor, x: Tensor, adjoint: bool) -> Tensor:
    """Map the rows of ``x (*, R, N)`` by Q (or its adjoint), given as factors."""
    right = t.mT
    if adjoint:
        right = t.conj()
    c = matmul(matmul(x, u.conj()), right)
    return x - matmul(c, u.mT)
