r"""The Stiefel manifold: N x M matrices with $X^H X = I$.

For N = M it is the orthogonal or unitary group. A tangent vector at X is $Z = XW + V$ with W
skew-Hermitian and $X^H V = 0$. Kept as this pair, it stays tangent to rounding, and a Cayley
retraction takes one M x M inverse. No function makes an N x N matrix or synchronizes with the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops._precision import in_full_precision

__all__ = ["Tangent", "cayley", "gradient", "inner", "polar", "project", "qr"]

# Factors that turn X^H G - G^H X into W of the Riemannian gradient.
_SKEW_SCALES = {"canonical": 1.0, "euclidean": 0.5}

METRICS = tuple(_SKEW_SCALES)

# Above this side torch solves a batch on a GPU by a library that waits for the host.
_LARGEST_IN_BATCHES = 128
# The most such matrices that are solved in turn. More of them may be faster as a batch.
_FEW = 8


@dataclass(frozen=True, eq=False)
class Tangent:
    r"""Hold a tangent vector $Z = XW + V$ at X. Such vectors at one X can be added and scaled.

    Attributes:
        skew: W, ``(*, M, M)``, skew-Hermitian.
        normal: V, ``(*, N, M)``, orthogonal to the columns of X.
    """

    skew: Tensor
    normal: Tensor

    def __add__(self, other: Tangent) -> Tangent:
        return Tangent(self.skew + other.skew, self.normal + other.normal)

    def __mul__(self, scale: float | Tensor) -> Tangent:
        return Tangent(self.skew * scale, self.normal * scale)

    def at(self, x: Tensor) -> Tensor:
        """Return the matrix Z ``(*, N, M)``, given the X at which it was made."""
        return _at(x, self)


def project(x: Tensor, z: Tensor) -> Tangent:
    r"""Return the tangent vector at X nearest to a matrix: $Z - X\,\mathrm{herm}(X^H Z)$.

    Args:
        x: ``(*, N, M)`` with orthonormal columns.
        z: ``(*, N, M)``.

    Returns:
        The projection. It is ``z`` itself if that is tangent already.

    Example:
        >>> x, z = torch.linalg.qr(torch.randn(6, 3)).Q, torch.randn(6, 3)
        >>> tangent = project(x, z).at(x)
        >>> (x.mT @ tangent + tangent.mT @ x).abs().max() < 1e-5
        tensor(True)
    """
    return _tangent(x, z, skew_scale("euclidean"))


def gradient(x: Tensor, g: Tensor, metric: str = "canonical") -> Tangent:
    r"""Return the Riemannian gradient at X, the paper's $A\Omega$.

    With the gradient G of a function in the ambient space, it is
    $$ G - X G^H X \ \text{(canonical)}, \quad G - X\,\mathrm{herm}(X^H G)\ \text{(Euclidean)}. $$

    Args:
        x: ``(*, N, M)`` with orthonormal columns.
        g: ``(*, N, M)``, what autograd computes.
        metric: "canonical" or "euclidean".

    Returns:
        The tangent vector Z with $\langle Z, T\rangle = \mathrm{Re\,Tr}(G^H T)$ in the metric, for
        every tangent T.

    Example:
        >>> x = torch.eye(3)[:, :2]
        >>> gradient(x, x).at(x).abs().max()
        tensor(0.)
    """
    check_metric("gradient", metric)
    return _tangent(x, g, skew_scale(metric))


def inner(x: Tensor, a: Tensor, b: Tensor, metric: str = "canonical") -> Tensor:
    r"""Compute the inner product of tangent vectors.

    $$ \mathrm{Re\,Tr}(A^H(I - \tfrac12 XX^H)B)\ \text{(canonical)}, \quad
       \mathrm{Re\,Tr}(A^H B)\ \text{(Euclidean)}. $$

    Args:
        x, a, b: ``(*, N, M)``.
        metric: "canonical" or "euclidean".

    Returns:
        ``(*,)``, real.

    Example:
        >>> x = torch.eye(2)
        >>> z = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
        >>> inner(x, z, z), inner(x, z, z, "euclidean")
        (tensor(1.), tensor(2.))
    """
    check_metric("inner", metric)
    whole = _trace(a, b)
    if metric == "euclidean":
        return whole
    return whole - _inside(x, a, b) / 2


@in_full_precision
def cayley(x: Tensor, z: Tangent, step: float | Tensor = 1.0) -> Tensor:
    r"""Take the Cayley retraction: from X along ``step`` times a tangent vector.

    With $A = XWX^H + VX^H - XV^H$, for which $AX = Z$, this is $\mathrm{Cayley}(-\eta A)\,X$. In
    the orthonormal basis of X and V the Woodbury identity leaves one M x M inverse,
    $$ X + (\eta V + X(\eta W - \tfrac{\eta^2}2 V^H V))
       (I - \tfrac\eta2 W + \tfrac{\eta^2}4 V^H V)^{-1}, $$
    of a matrix whose Hermitian part is at least I. The inverse always exists, and its norm is at
    most 1. For N = M, V is zero, and one solve of $\eta XW(I - \tfrac\eta2 W)^{-1}$ remains.

    Args:
        x: ``(*, N, M)`` with orthonormal columns.
        z: a tangent vector at X.
        step: $\eta$, a number or ``(*, 1, 1)``. A step $\eta Z$ whose Frobenius norm is above
            eps^(-1/3) (200 in float32, 2e5 in float64) is shortened to that, because rounding
            grows with its square.

    Returns:
        ``(*, N, M)``, orthonormal to rounding, whatever the rounding of X. The result is replaced
        by its polar factor.

    Example:
        >>> x = torch.linalg.qr(torch.randn(6, 3)).Q
        >>> orthogonality_error(cayley(x, gradient(x, torch.randn(6, 3)), -10.0)) < 1e-5
        True
    """
    scaled = _scale(x, z, step)
    skew = scaled.step * scaled.skew
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    if scaled.normal is None:
        denominator = torch.add(eye, skew, alpha=-0.5)
        change = _solve(denominator, x @ skew, left=False)
        return _near_polar(x + change)
    square = scaled.step.square() * (scaled.normal.mH @ scaled.normal)
    denominator = eye - skew / 2 + square / 4
    inverse = _solve(denominator, eye.expand_as(square))
    numerator = scaled.step * scaled.normal + x @ (skew - square / 2)
    return _polar(x + numerator @ inverse)


def _solve(a: Tensor, b: Tensor, left: bool = True) -> Tensor:
    """Solve for batches ``(*, M, M)``. A few large matrices on a GPU are solved in turn.

    A CUDA graph cannot capture torch's solver for a batch of them.
    """
    few = 1 < a.shape[:-2].numel() <= _FEW
    if not (a.is_cuda and few and a.shape[-1] > _LARGEST_IN_BATCHES):
        return torch.linalg.solve_ex(a, b, left=left).result
    pairs = zip(a.flatten(0, -3), b.flatten(0, -3), strict=True)
    solved = [torch.linalg.solve_ex(one, other, left=left).result for one, other in pairs]
    return torch.stack(solved).view_as(b)


@in_full_precision
def qr(x: Tensor, z: Tangent, step: float | Tensor = 1.0) -> Tensor:
    r"""Take the QR retraction $\mathrm{qf}(X + \eta Z)$: the Q of an R with a positive diagonal.

    Two Cholesky factorizations of the Gram matrix compute it. They cannot fail: the Gram matrix of
    $X + \eta Z$ is $I + \eta^2 Z^H Z$, and the length of the step is bounded.

    Args:
        x: ``(*, N, M)`` with orthonormal columns.
        z: a tangent vector at X.
        step: $\eta$, a number or ``(*, 1, 1)``, shortened as in :func:`cayley`.

    Returns:
        ``(*, N, M)``, orthonormal to rounding.

    Example:
        >>> x = torch.linalg.qr(torch.randn(6, 3)).Q
        >>> orthogonality_error(qr(x, gradient(x, torch.randn(6, 3)), -10.0)) < 1e-5
        True
    """
    scaled = _scale(x, z, step)
    direction = x @ scaled.skew
    if scaled.normal is not None:
        direction += scaled.normal
    y = x + scaled.step * direction
    for _ in range(2):
        r = torch.linalg.cholesky_ex(y.mH @ y, upper=True).L
        y = torch.linalg.solve_triangular(r, y, upper=True, left=False)
    return y


@in_full_precision
def polar(x: Tensor) -> Tensor:
    r"""Compute the nearest point to a matrix close to the manifold: $X(X^H X)^{-1/2}$, as a series.

    Args:
        x: ``(*, N, M)``. If $X^H X$ is off by E, the result is off by about $E^5$ and rounding.

    Example:
        >>> orthogonality_error(polar(1.01 * torch.eye(5, 3, dtype=torch.float64))) < 1e-8
        True
    """
    return _polar(x)


RETRACTIONS = {"cayley": cayley, "qr": qr}


def check_metric(call: str, metric: str) -> None:
    """Raise unless it is the name of a metric."""
    if metric not in METRICS:
        known = ", ".join(map(repr, METRICS))
        raise ValueError(f"{call}: metric must be one of {known}, got {metric!r}.")


def skew_scale(metric: str) -> float:
    """Return the factor by which $X^H G - G^H X$ becomes W of the Riemannian gradient."""
    return _SKEW_SCALES[metric]


def longest_step(dtype: torch.dtype) -> float:
    """Return the Frobenius norm to which a retraction shortens longer steps."""
    return torch.finfo(dtype).eps ** (-1 / 3)


def gram_error(x: Tensor) -> Tensor:
    """Compute ``x.mH @ x - I``."""
    gram = x.mH @ x
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    return gram


def divide(x: Tensor, size: Tensor) -> Tensor:
    """Compute ``x / size`` for real sizes.

    torch squares the divisor of complex numbers, and loses tiny ones.
    """
    if x.is_complex():
        return torch.complex(x.real / size, x.imag / size)
    return x / size


@in_full_precision
def _tangent(x: Tensor, z: Tensor, scale: float) -> Tangent:
    """Return the tangent vector with W = ``scale`` times $X^H Z - Z^H X$."""
    if x.shape[-2] < x.shape[-1] or x.shape != z.shape:
        raise ValueError(
            "stiefel: a point and a matrix of its shape must be (*, N, M) with N >= M, "
            f"got {tuple(x.shape)} and {tuple(z.shape)}."
        )
    product = x.mH @ z
    skew = product - product.mH
    if scale != 1:
        skew *= scale
    if _is_square(x):
        return Tangent(skew, torch.zeros_like(z))
    normal = z - x @ product
    # If z is almost in the span of X, the rest is rounding, which a second projection removes.
    return Tangent(skew, normal - x @ (x.mH @ normal))


@dataclass(frozen=True, eq=False)
class _Scaled:
    """Hold a tangent vector whose largest entry is 1, and a step along it of bounded length.

    Attributes:
        skew: W.
        normal: V, or None for N = M.
        step: the step along the vector, ``(*, 1, 1)``.
    """

    skew: Tensor
    normal: Tensor | None
    step: Tensor


def _scale(x: Tensor, z: Tangent, step: float | Tensor) -> _Scaled:
    size = _largest(z.skew)
    if not _is_square(x):
        size = torch.maximum(size, _largest(z.normal))
    size = size.clamp_min(torch.finfo(size.dtype).tiny)
    skew = divide(z.skew, size)
    length = _frobenius(skew)
    normal = None
    if not _is_square(x):
        normal = divide(z.normal, size)
        length = torch.hypot(length, _frobenius(normal))
    longest = longest_step(size.dtype) / length
    bounded = torch.clamp((size * step).to(size.dtype), -longest, longest)
    return _Scaled(skew, normal, bounded)


def _is_square(x: Tensor) -> bool:
    return x.shape[-2] == x.shape[-1]


@in_full_precision
def _at(x: Tensor, z: Tangent) -> Tensor:
    return x @ z.skew + z.normal


@in_full_precision
def _inside(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return _trace(x.mH @ a, x.mH @ b)


def _polar(x: Tensor) -> Tensor:
    error = gram_error(x)
    # (I + E)^(-1/2) - I = -E/2 + 3/8 E² - 5/16 E³ + 35/128 E⁴ - …
    # The last two terms are E² times a matrix.
    square = error @ error
    tail = torch.mul(error, 5 / 16).sub_(square, alpha=35 / 128)
    series = square @ tail
    series.add_(error, alpha=1 / 2).sub_(square, alpha=3 / 8)
    return x - x @ series


def _near_polar(x: Tensor) -> Tensor:
    """Correct rounding only, with a third of the operations of :func:`_polar`.

    The result is off by about E³.
    """
    error = gram_error(x)
    return x - x @ torch.sub(error / 2, error @ error, alpha=3 / 8)


def _trace(a: Tensor, b: Tensor) -> Tensor:
    return (a.conj() * b).real.sum((-2, -1))


def _largest(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, torch.inf, dim=(-2, -1), keepdim=True)


def _frobenius(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
