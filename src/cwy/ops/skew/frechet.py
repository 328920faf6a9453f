r"""The matrix exponential and its derivative to rounding, by scaling and squaring.

As few products are used as the norm allows. The derivative $L(A, dA)$ carries a slope along with
each product, $d(XY) = dX\,Y + X\,dY$. This takes three products for one. An exponential
of twice the size would take eight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .._linalg import add_product_, has_fast_double, widen
from .capturable import RADIUS, exponential, most_squarings


@dataclass(frozen=True)
class Pair:
    """Hold a matrix ``(N, N)`` or ``(B, N, N)`` and its derivative, if one is wanted."""

    value: Tensor
    slope: Tensor | None = None

    def __matmul__(self, other: Pair) -> Pair:
        value = self.value @ other.value
        if self.slope is None or other.slope is None:
            return Pair(value)
        return Pair(value, add_product_(self.slope @ other.value, self.value, other.slope))

    def __mul__(self, factor: float | Tensor) -> Pair:
        value = self.value * factor
        if self.slope is None:
            return Pair(value)
        return Pair(value, self.slope * factor)

    def add_(self, other: Pair, factor: float) -> None:
        """Add ``factor`` times the other in place."""
        self.value.add_(other.value, alpha=factor)
        if self.slope is not None and other.slope is not None:
            self.slope.add_(other.slope, alpha=factor)

    def where(self, condition: Tensor, other: Pair) -> Pair:
        """Return this pair where the condition holds for a matrix of a batch, else the other."""
        value = torch.where(condition, self.value, other.value)
        if self.slope is None or other.slope is None:
            return Pair(value)
        return Pair(value, torch.where(condition, self.slope, other.slope))


@dataclass(frozen=True)
class Polynomial:
    """Describe a Taylor polynomial, by powers up to the ``step``-th and Horner's rule in it."""

    degree: int
    step: int

    @property
    def products(self) -> int:
        return self.step - 1 + self.degree // self.step - 1

    def radius(self, tolerance: float) -> float:
        """Return the norm up to which the relative backward error is at most the tolerance."""
        return (tolerance * math.factorial(self.degree + 1)) ** (1 / self.degree)


POLYNOMIALS = [
    Polynomial(2, 2),
    Polynomial(4, 2),
    Polynomial(6, 3),
    Polynomial(9, 3),
    Polynomial(12, 4),
    Polynomial(16, 4),
]


def largest_norm(dtype: torch.dtype) -> float:
    """Return the norm from which the rounding of all squarings takes over half of the digits."""
    return torch.finfo(dtype).eps ** -0.5


def widened(a: Tensor) -> Tensor:
    """Return ``a`` in float64 (complex128) where that costs at most a few times float32."""
    if a.is_cuda:
        fast = has_fast_double(a.get_device())
    else:
        fast = a.device.type == "cpu"
    if fast:
        return widen(a)
    return a


def exponential_and_slope(a: Tensor, da: Tensor | None, tolerance: float, waiting: bool) -> Pair:
    r"""Return $\exp(A)$, and $L(A, dA)$ if there is a dA.

    Args:
        a, da: ``(N, N)`` or ``(B, N, N)``.
        tolerance: the error that the polynomial may leave in the result.
        waiting: whether the host may read norms. Otherwise the polynomial is the largest one, and
            surplus squarings are discarded.

    Raises:
        ValueError: if the norm is so large that rounding spoils the result. If the host does
            not wait, the result is NaN.
    """
    pair = Pair(a, da)
    if a.numel() == 0:
        return pair * 1
    norm = torch.linalg.matrix_norm(a, 1)
    if waiting:
        return _by_norm(pair, norm, tolerance)
    if da is None:
        result = Pair(exponential(a))
    else:
        result = _without_waiting(pair, norm)
    fits = norm <= largest_norm(a.dtype)
    return result.where(fits[..., None, None], result * math.nan)


def _by_norm(pair: Pair, norm: Tensor, tolerance: float) -> Pair:
    """Return the exponential by the polynomial and the squarings that need the fewest products."""
    limit = largest_norm(pair.value.dtype)
    largest = norm.max().item()
    for few in POLYNOMIALS[:2]:
        if largest <= few.radius(tolerance):
            return _evaluated(few, [pair, pair @ pair])
    if math.isnan(largest):
        return pair * math.nan
    if math.isinf(largest):
        raise _too_large(largest, limit)
    powers = [pair, pair @ pair]
    powers.append(powers[1] @ pair)
    # Powers bound the terms of the series better than the norm does. For a normal matrix they come
    # near its largest eigenvalue.
    norms = [
        torch.linalg.matrix_norm(power.value, 1) ** (1 / k) for k, power in enumerate(powers[1:], 2)
    ]
    norm = torch.maximum(*norms)
    largest = norm.max().item()
    if not largest <= limit:
        raise _too_large(largest, limit)
    tolerance = max(tolerance / max(1, largest), torch.finfo(pair.value.dtype).eps / 4)
    best = min(
        POLYNOMIALS[2:], key=lambda p: p.products + _squarings(largest / p.radius(tolerance))
    )
    radius = best.radius(tolerance)
    most = _squarings(largest / radius)
    squarings = (norm / radius).clamp(min=1).log2().ceil().clamp(max=most)[..., None, None]
    if most > 0:
        scale = torch.exp2(-squarings)
        powers = [power * scale**k for k, power in enumerate(powers, 1)]
    result = _evaluated(best, powers)
    alike = squarings.min().item() == most
    for k in range(most):
        square = result @ result
        if not alike:
            square = square.where(squarings > k, result)
        result = square
    return result


def _too_large(norm: float, limit: float) -> ValueError:
    return ValueError(
        f"matrix_exp: the norm of A is {norm:.2g}, and above {limit:.2g} rounding spoils exp(A). "
        "Lower the learning rate, or decay the parameter."
    )


def _squarings(ratio: float) -> int:
    return math.ceil(math.log2(max(ratio, 1)))


def _without_waiting(pair: Pair, norm: Tensor) -> Pair:
    """Return the same as :func:`.capturable.exponential`, with the slope."""
    squarings = (norm / RADIUS).clamp(min=1).log2().ceil()[..., None, None]
    scaled = pair * torch.exp2(-squarings)
    square = scaled @ scaled
    result = _evaluated(POLYNOMIALS[-1], [scaled, square, square @ scaled])
    for k in range(most_squarings(pair.value)):
        result = (result @ result).where(squarings > k, result)
    return result


def _evaluated(polynomial: Polynomial, powers: list[Pair]) -> Pair:
    """Evaluate a polynomial from the first two or three powers."""
    if polynomial.step == 4:
        powers = [*powers, powers[1] @ powers[1]]
    *low, top = powers
    result = top * (1 / math.factorial(polynomial.degree))
    for k in range(polynomial.degree - polynomial.step, -1, -polynomial.step):
        for i, power in enumerate(low, 1):
            result.add_(power, 1 / math.factorial(k + i))
        result.value.diagonal(dim1=-2, dim2=-1).add_(1 / math.factorial(k))
        if k > 0:
            result = result @ top
    return result
