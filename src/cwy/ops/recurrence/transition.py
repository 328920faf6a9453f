r"""The transition as a step sees it: formed, or in low-rank form, $\mathrm{diag}(d) - W Y^H$.

Rows are vectors, ``h (B, N)``. The transition of images is :class:`.convolved.Convolved`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from .._linalg import widen

NARROW = 32
"""Numbers of a row up to which sums over all rows are float64, which costs little."""

Step = Callable[[Tensor, Tensor, Tensor], object]
"""``step(x, h, out)`` writes the result to ``out``."""


def sum_products(a: Tensor, b: Tensor) -> Tensor:
    r"""Compute $\sum_k a_k b_k^H$ over rows.

    With few columns a long sum in float32 would lose digits that plain steps keep.
    """
    if max(a.shape[-1], b.shape[-1]) > NARROW:
        return a.mT @ b.conj()
    return (widen(a).mT @ widen(b).conj()).to(a.dtype)


def sum_to(x: Tensor, shape: torch.Size) -> Tensor:
    """Add up rows to the shape of a bias, with the precision of :func:`sum_products`."""
    if x.shape[1:].numel() > NARROW:
        return x.sum_to_size(shape)
    return widen(x).sum_to_size(shape).to(x.dtype)


class Transition:
    """Apply the linear map Q of a recurrence, and the map of its inputs.

    Steps write to memory that is given. What is differentiable returns new tensors.
    """

    @property
    def tensors(self) -> list[Tensor]:
        """Return its tensors, from which ``type(self)(*tensors)`` makes it again."""
        raise NotImplementedError

    @property
    def reflections(self) -> int | None:
        """Return L if it is in low-rank form, else None."""
        return None

    @property
    def setting(self) -> str | None:
        """Return the setting of torch that a captured step keeps, or None."""
        return None

    def multiply(self, h: Tensor) -> Tensor:
        """Return $Qh$ for each row of h, differentiable."""
        raise NotImplementedError

    def multiply_adjoint(self, delta: Tensor) -> Tensor:
        r"""Return $Q^H\delta$ for each row, differentiable."""
        raise NotImplementedError

    def step(self, x: Tensor, h: Tensor, out: Tensor) -> None:
        """Write $x + Qh$."""
        raise NotImplementedError

    def back(self, g: Tensor, delta: Tensor, out: Tensor) -> None:
        r"""Write $g + Q^H\delta$."""
        raise NotImplementedError

    def fastest_step(self, h: Tensor) -> Step:
        """Return the fastest :meth:`step` for many states like h."""
        return self.step

    def fastest_back(self, h: Tensor) -> Step:
        """Return the fastest :meth:`back` for many states like h."""
        return self.back

    def grad(self, deltas: Tensor, before: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of its tensors from all deltas and the states before them."""
        raise NotImplementedError

    def map_inputs(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the product of each input with a weight ``(N, K)``."""
        return linear(x, weight)

    def map_inputs_back(self, deltas: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the weight, differentiable."""
        return deltas @ weight.conj(), deltas.mT @ x.conj()


@dataclass(frozen=True)
class Formed(Transition):
    """Apply Q itself, ``(N, N)``."""

    q: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [self.q]

    def multiply(self, h: Tensor) -> Tensor:
        return h @ self.q.mT

    def multiply_adjoint(self, delta: Tensor) -> Tensor:
        return delta @ self.q.conj()

    def step(self, x: Tensor, h: Tensor, out: Tensor) -> None:
        torch.addmm(x, h, self.q.mT, out=out)

    def back(self, g: Tensor, delta: Tensor, out: Tensor) -> None:
        torch.addmm(g, delta, self.q.conj(), out=out)

    def grad(self, deltas: Tensor, before: Tensor) -> tuple[Tensor | None, ...]:
        return (sum_products(deltas, before),)


@dataclass(frozen=True)
class LowRank(Transition):
    r"""Apply $Q = \mathrm{diag}(d) - W Y^H$: ``w, y (N, L)``, ``d (N,)``."""

    w: Tensor
    y: Tensor
    d: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [self.w, self.y, self.d]

    @property
    def reflections(self) -> int | None:
        return self.w.shape[1]

    def multiply(self, h: Tensor) -> Tensor:
        return h * self.d - (h @ self.y.conj()) @ self.w.mT

    def multiply_adjoint(self, delta: Tensor) -> Tensor:
        return delta * self.d.conj() - (delta @ self.w.conj()) @ self.y.mT

    def step(self, x: Tensor, h: Tensor, out: Tensor) -> None:
        torch.addcmul(x, h, self.d, out=out)
        out.addmm_(h @ self.y.conj(), self.w.mT, alpha=-1)

    def back(self, g: Tensor, delta: Tensor, out: Tensor) -> None:
        c = delta @ self.w.conj()
        torch.addcmul(g, delta, self.d.conj(), out=out)
        out.addmm_(c, self.y.mT, alpha=-1)

    def grad(self, deltas: Tensor, before: Tensor) -> tuple[Tensor | None, ...]:
        diagonal = (deltas * before.conj()).sum(0)
        return *self._grad_factors(deltas, before), diagonal

    def _grad_factors(self, deltas: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        dw = -sum_products(deltas, before @ self.y.conj())
        dy = -sum_products(before, deltas @ self.w.conj())
        return dw, dy


class FixedDiagonal(LowRank):
    """Apply the same with a diagonal that is not learned and gets no gradient."""

    def grad(self, deltas: Tensor, before: Tensor) -> tuple[Tensor | None, ...]:
        return *self._grad_factors(deltas, before), None
