"""URNN: diagonals, reflections and Fourier transforms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import ops
from ..registry import register
from .base import ComplexMap


@register(
    "urnn",
    domain="subset of U(N)",
    kind="square",
    real=False,
    complex=True,
    paper="Arjovsky et al. 2016",
)
class URNN(ComplexMap):
    r"""Compute $Q = D_3 H_2 F^{-1} D_2 \Pi H_1 F D_1$: phases D, reflections H, the DFT F.

    Covers a subset of U(N): it has fewer than 7N real degrees of freedom, where U(N) has $N^2$.
    Costs $O(N\log N)$ per vector (Table 1), by fast Fourier transforms, which are unitary here. The
    matrix is never formed to multiply.

    The free parameters are ``phase (*, 3, N)``, real, and ``v (*, 2, N)``, complex. They start
    uniform in $[-\pi, \pi]$ and $[-1, 1]$, as in the paper. $\Pi$ is a permutation, drawn when the
    map is made, shared by a batch, and kept in the state dict. There is no inverse: a matrix can't
    be assigned.

    Args:
        n, m: N. ``m``, if given, is N too.
        batch, dtype, device: of the weight, complex.

    Example:
        >>> q = URNN(6)
        >>> orthogonality_error(q(*q.sample())) < 1e-5
        True
    """

    permutation: Tensor

    def __init__(self, n: int, m: int | None = None, **like) -> None:
        super().__init__(n, m, **like)
        self.register_buffer("permutation", torch.randperm(n, device=self.device))

    def _times(self, free: tuple[Tensor, ...], x: Tensor, adjoint: bool) -> Tensor:
        phase, v = free
        d1, d2, d3 = (self._between(d, x) for d in self._turns(phase).unbind(-2))
        # A zero vector means no reflection.
        unit = ops.wy_factors(v.mT).u
        u1, u2 = (self._between(u, x) for u in unit.unbind(-1))
        if adjoint:
            x = torch.fft.fft(_reflect(u2, x * d3.conj()), norm="ortho") * d2.conj()
            x = torch.zeros_like(x).index_copy(-1, self.permutation, x)
            return torch.fft.ifft(_reflect(u1, x), norm="ortho") * d1.conj()
        x = _reflect(u1, torch.fft.fft(x * d1, norm="ortho")).index_select(-1, self.permutation)
        return _reflect(u2, torch.fft.ifft(x * d2, norm="ortho")) * d3

    def free(self, matrix: Tensor):
        raise ValueError(
            f"{self._call}: URNN covers only a subset of U(N) and has no inverse, "
            "so no matrix can be assigned, and init must be 'random'. "
            "Use method='cwy' or 'hr', which reach every unitary matrix."
        )

    def sample(self) -> tuple[Tensor, Tensor]:
        real = {"dtype": self.dtype.to_real(), "device": self.device}
        phase = torch.empty(*self.batch, 3, self.n, **real).uniform_(-math.pi, math.pi)
        parts = torch.empty(*self.batch, 2, self.n, 2, **real).uniform_(-1, 1)
        return phase, torch.view_as_complex(parts)


def _reflect(u: Tensor, x: Tensor) -> Tensor:
    """Return x reflected at the hyperplane orthogonal to the unit vector u."""
    # Summed, not a matrix product, which TF32 would round.
    return x - 2 * u * (u.conj() * x).sum(-1, keepdim=True)
