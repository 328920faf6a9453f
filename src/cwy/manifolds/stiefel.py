r"""The Stiefel manifold: N x M matrices with $X^H X = I$; for N = M the orthogonal or unitary group.

A tangent vector at X is $Z = XW + V$ with W skew-Hermitian and $X^H V = 0$. Kept as this pair, it stays tangent to rounding,
and a Cayley retraction takes one M x M inverse: nothing here makes an N x N matrix. No function waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops._precision import in_full_precision

__all__ = ["Tangent", "cayley", "gradient", "inner", "polar", "project", "qr"]

METRICS = ("canonical", "euclidean")


@dataclass(frozen=True, eq=False)
class Tangent:
    r"""A tangent vector $Z = XW + V$ at X; such vectors at one X can be added and scaled.

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
        """The matrix Z ``(*, N, M)``, given the X at which it was made."""
        return _at(x, self)


def project(x: Tensor, z: Tensor) -> Tangent:
    r"""The tangent vector at X nearest to a matrix: $Z - X\,\mathrm{herm}(X^H Z)$.

    Args:
        x: ``(*, N, M)`` with orthonormal columns.
        z: ``(*, N, M)``.

    Returns:
        The projection; it is ``z`` itself if that is tangent already.

    Example:
        >>> x, z = torch.linalg.qr(torch.randn(6, 3)).Q, torch.randn(6, 3)
        >>> tangent = project(x, z).at(x)
        >>> (x.mT @ tangent + tangent.mT @ x).abs().max() < 1e-5
        tensor(True)
    """
    return _tangent(x, z, 0.5)


@in_full_precision
def _tangent(x: Tensor, z: Tensor, scale: float) -> Tangent:
    """The tangent vector with W = ``scale`` times $X^H Z - Z^H X$."""
    if x.shape[-2] < x.shape[-1] or x.shape != z.shape:
        shapes = f"{tuple(x.shape)} and {tuple(z.shape)}"
        raise ValueError(
            f"stiefel: a point and a matrix beside it must be (*, N, M) with N >= M, got {shapes}."
        )
    s = x.mH @ z
    skew = s - s.mH
    if scale != 1:
        skew *= scale
    if _square(x):
        return Tangent(skew, torch.zeros_like(z))
    normal = z - x @ s
    # Where z is almost in the span of X, what is left is rounding: once more takes that off, too.
    return Tangent(skew, normal - x @ (x.mH @ normal))


def gradient(x: Tensor, g: Tensor, metric: str = "canonical") -> Tangent:
    r"""The Riemannian gradient at X of a function with gradient G in the ambient space: the paper's $A\Omega$.

    $$ G - X G^H X \ \text{(canonical)}, \quad G - X\,\mathrm{herm}(X^H G)\ \text{(Euclidean)}. $$

    Args:
        x: ``(*, N, M)`` with orthonormal columns.
        g: ``(*, N, M)``, what autograd gives.
        metric: "canonical" or "euclidean".

    Returns:
        The tangent vector Z with $\langle Z, T\rangle = \mathrm{Re\,Tr}(G^H T)$ in the metric, for every tangent T.

    Example:
        >>> x = torch.eye(3)[:, :2]
        >>> gradient(x, x).at(x).abs().max()
        tensor(0.)
    """
    check_metric("gradient", metric)
    return _tangent(x, g, 1.0 if metric == "canonical" else 0.5)


def inner(x: Tensor, a: Tensor, b: Tensor, metric: str = "canonical") -> Tensor:
    r"""The inner product of tangent vectors: $\mathrm{Re\,Tr}(A^H(I - \tfrac12 XX^H)B)$, or $\mathrm{Re\,Tr}(A^H B)$.

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
    return whole - _inside(x, a, b) / 2 if metric == "canonical" else whole


@in_full_precision
def cayley(x: Tensor, z: Tangent, step: float | Tensor = 1.0) -> Tensor:
    r"""The Cayley retraction: from X along ``step`` times a tangent vector, on a curve within the manifold.

    With $A = XWX^H + VX^H - XV^H$, for which $AX = Z$, this is $\mathrm{Cayley}(-\eta A)\,X$. In the orthonormal basis of X and
    V the Woodbury identity leaves one M x M inverse,
    $$ X + (\eta V + X(\eta W - \tfrac{\eta^2}2 V^H V))(I - \tfrac\eta2 W + \tfrac{\eta^2}4 V^H V)^{-1}, $$
    of a matrix whose Hermitian part is at least I: it always exists, and its norm is at most 1. Where N = M, V is zero, and
    one solve of $\eta XW(I - \tfrac\eta2 W)^{-1}$ remains.

    Args:
        x: ``(*, N, M)`` with orthonormal columns.
        z: a tangent vector at X.
        step: $\eta$, a number or ``(*, 1, 1)``. A step $\eta Z$ whose Frobenius norm is above eps^(-1/3) (200 in float32, 2e5
            in float64) is shortened to that: rounding grows with its square.

    Returns:
        ``(*, N, M)``, orthonormal to rounding, whatever the rounding of X: the result is brought to its polar factor.

    Example:
        >>> x = torch.linalg.qr(torch.randn(6, 3)).Q
        >>> orthogonality_error(cayley(x, gradient(x, torch.randn(6, 3)), -10.0)) < 1e-5
        True
    """
    w, v, step = _scaled(x, z, step)
    skew = step * w
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    if v is None:
        change = torch.linalg.solve_ex(
            torch.add(eye, skew, alpha=-0.5), x @ skew, left=False
        ).result
        return _near_polar(x + change)
    square = step.square() * (v.mH @ v)
    inverse = torch.linalg.solve_ex(eye - skew / 2 + square / 4, eye.expand_as(square)).result
    return _polar(x + (step * v + x @ (skew - square / 2)) @ inverse)


@in_full_precision
def qr(x: Tensor, z: Tangent, step: float | Tensor = 1.0) -> Tensor:
    r"""The QR retraction: $\mathrm{qf}(X + \eta Z)$, the Q for which R has a positive diagonal.

    Two Cholesky factorisations of the Gram matrix give it. They cannot fail: the Gram matrix of $X + \eta Z$ is
    $I + \eta^2 Z^H Z$, and the length of the step is bounded.

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
    w, v, step = _scaled(x, z, step)
    direction = x @ w
    if v is not None:
        direction += v
    y = x + step * direction
    for _ in range(2):
        r = torch.linalg.cholesky_ex(y.mH @ y, upper=True).L
        y = torch.linalg.solve_triangular(r, y, upper=True, left=False)
    return y


@in_full_precision
def polar(x: Tensor) -> Tensor:
    r"""The nearest point of the manifold to a matrix that is close to it: $X(X^H X)^{-1/2}$, by its series.

    Args:
        x: ``(*, N, M)``. Where it is off by E in $X^H X$, the result is by about $E^5$; rounding aside.

    Example:
        >>> orthogonality_error(polar(1.01 * torch.eye(5, 3, dtype=torch.float64))) < 1e-8
        True
    """
    return _polar(x)


RETRACTIONS = {"cayley": cayley, "qr": qr}


def check_metric(call: str, metric: str) -> None:
    """Raises unless it is the name of a metric."""
    if metric not in METRICS:
        raise ValueError(
            f"{call}: metric must be one of {', '.join(map(repr, METRICS))}, got {metric!r}."
        )


def over(x: Tensor, size: Tensor) -> Tensor:
    """x / size for real sizes; torch squares those that divide complex numbers, and tiny ones are then lost."""
    return torch.complex(x.real / size, x.imag / size) if x.is_complex() else x / size


def _scaled(x: Tensor, z: Tangent, step: float | Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """W and V of a vector whose largest entry is 1, and the step along it, of bounded length; no V where N = M."""
    if _square(x):
        size = _largest(z.skew)
    else:
        size = torch.maximum(_largest(z.skew), _largest(z.normal))
    limits = torch.finfo(size.dtype)
    size = size.clamp_min(limits.tiny)
    w = over(z.skew, size)
    v = None
    length = _frobenius(w)
    if not _square(x):
        v = over(z.normal, size)
        length = torch.hypot(length, _frobenius(v))
    longest = limits.eps ** (-1 / 3) / length
    return w, v, torch.clamp((size * step).to(size.dtype), -longest, longest)


def _square(x: Tensor) -> bool:
    return x.shape[-2] == x.shape[-1]


@in_full_precision
def _at(x: Tensor, z: Tangent) -> Tensor:
    return x @ z.skew + z.normal


@in_full_precision
def _inside(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return _trace(x.mH @ a, x.mH @ b)


def _polar(x: Tensor) -> Tensor:
    e = gram_error(x)
    # (I + E)^(-1/2) - I = -E/2 + 3/8 E² - 5/16 E³ + 35/128 E⁴ - …, its last two terms as E² times a matrix.
    square = e @ e
    tail = torch.mul(e, 5 / 16).sub_(square, alpha=35 / 128)
    series = square @ tail
    series.add_(e, alpha=1 / 2).sub_(square, alpha=3 / 8)
    return x - x @ series


def _near_polar(x: Tensor) -> Tensor:
    """As :func:`_polar`, where rounding is all that is to be mended: a third of the operations, off by about E³."""
    e = gram_error(x)
    return x - x @ torch.sub(e / 2, e @ e, alpha=3 / 8)


def gram_error(x: Tensor) -> Tensor:
    """Compute ``x.mH @ x - I``."""
    gram = x.mH @ x
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    return gram


def _trace(a: Tensor, b: Tensor) -> Tensor:
    return (a.conj() * b).real.sum((-2, -1))


def _largest(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, torch.inf, dim=(-2, -1), keepdim=True)


def _frobenius(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
