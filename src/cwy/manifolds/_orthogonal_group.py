r"""The orthogonal or unitary group: a step of one N x N matrix, verified on the host.

A tangent vector at X is XW with W skew-Hermitian. The general functions for N x M matrices are in
:mod:`cwy.manifolds.stiefel`. These functions take half of their operations, which is what counts
for a small matrix on a CPU. The caller holds off reduced precision.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .stiefel import longest_step

__all__ = ["skew_product", "verified_cayley"]


def skew_product(x: Tensor, z: Tensor) -> Tensor:
    """Return ``x.mH @ z - z.mH @ x``.

    Args:
        x: ``(N, N)``.
        z: ``(N, N)``.

    Returns:
        ``(N, N)``, skew-Hermitian to the last bit.
    """
    product = torch.mm(x.mH, z)
    return product - product.mH


def verified_cayley(x: Tensor, skew: Tensor, step: float) -> Tensor | None:
    r"""Take a Cayley step, unless X or the step needs more care than this function takes.

    $$ Y = X\,(I + \tfrac\eta2 W)(I - \tfrac\eta2 W)^{-1} = X + \eta XW(I - \tfrac\eta2 W)^{-1} $$
    is X times an orthogonal matrix, whatever X is. The Frobenius norm of $E = Y^H Y - I$ is
    therefore that of $X^H X - I$. One Gram matrix verifies X and corrects the rounding of Y.
    If $\lVert E\rVert_F$ is at most $\sqrt{\mathrm{eps}}$, the first-order correction
    $Y - \tfrac12 YE$ is the polar factor of Y to within $\tfrac38$ eps.

    Args:
        x: ``(N, N)``, on the CPU.
        skew: W, ``(N, N)``.
        step: $\eta$.

    Returns:
        ``(N, N)``, orthogonal to rounding. None if the norm of E is above $\sqrt{\mathrm{eps}}$, if
        the step is longer than :func:`cwy.manifolds.stiefel.cayley` allows, or if a number is
        huge or not finite.
    """
    limits = _limits(x.dtype)
    norm = torch.linalg.vector_norm(skew).item()
    length = abs(step) * norm
    # Comparisons with a NaN are false.
    if not (length <= limits.longest and norm <= limits.norm and abs(step) <= limits.step):
        return None
    eye = _identity(x.shape[0], x.dtype)
    if length <= limits.short:
        y = _step_by_series(x, skew, step)
    else:
        denominator = torch.add(eye, skew, alpha=-step / 2)
        quotient = torch.linalg.solve_ex(denominator, x, left=False).result
        # (I + H)(I - H)^-1 = 2 (I - H)^-1 - I
        y = torch.lerp(x, quotient, 2.0)
    error = torch.addmm(eye, y.mH, y, beta=-1)
    if not torch.linalg.vector_norm(error).item() <= limits.error:
        return None
    return torch.addmm(y, y, error, alpha=-0.5)


def _step_by_series(x: Tensor, skew: Tensor, step: float) -> Tensor:
    r"""Compute $X + \eta XW(I + H)(I + H^2)$ with $H = \tfrac\eta2 W$.

    The rest of the series of $\eta XW(I - H)^{-1}$ has a norm of about $2\lVert H\rVert^5$. Three
    products take a third of the time of a solve at 24 x 24, and a small step keeps its digits.
    """
    tangent = torch.mm(x, skew)
    partial = torch.addmm(tangent, tangent, skew, alpha=step / 2)
    square = torch.mm(skew, skew)
    change = torch.addmm(partial, partial, square, alpha=step * step / 4)
    return torch.add(x, change, alpha=step)


@dataclass(frozen=True, slots=True)
class _Limits:
    """Hold the numbers with which a step in one dtype is compared.

    Attributes:
        short: the length up to which the rest of the series is below a quarter of eps.
        longest: the length above which the general retraction shortens a step.
        norm: the norm of W above which products overflow.
        step: the largest number of the dtype.
        error: the largest Frobenius norm of $X^H X - I$.
    """

    short: float
    longest: float
    norm: float
    step: float
    error: float


@functools.lru_cache
def _limits(dtype: torch.dtype) -> _Limits:
    info = torch.finfo(dtype)
    return _Limits(
        short=2 * (info.eps / 8) ** 0.2,
        longest=longest_step(dtype),
        norm=info.max**0.5,
        step=info.max,
        error=info.eps**0.5,
    )


@functools.lru_cache(maxsize=8)
def _identity(size: int, dtype: torch.dtype) -> Tensor:
    # A default device may be set, but the matrix of a verified step is on the CPU.
    return torch.eye(size, dtype=dtype, device="cpu")
