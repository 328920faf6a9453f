"""EURNN: layers of rotations of neighbouring coordinates."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..registry import register
from .base import ComplexMap


@register(
    "eurnn",
    domain="subset of U(N); L = N: U(N)",
    kind="square",
    real=False,
    complex=True,
    paper="Jing et al. 2017",
)
class EURNN(ComplexMap):
    r"""$Q = D F_1\cdots F_L$ with phases D and layers F of rotations of pairs of neighbours.

    The pairs are (0, 1), (2, 3), … in $F_1, F_3, …$ and (1, 2), (3, 4), … in $F_2, F_4, …$; each is turned by
    $$ \begin{bmatrix} e^{i\varphi}\cos\theta & -\sin\theta \\ e^{i\varphi}\sin\theta & \cos\theta \end{bmatrix}. $$
    (With $e^{i\varphi}$ in a row instead, D would absorb that of $F_1$, and U(N) would not be covered.) With L = N, that is
    $N^2$ angles in all, it covers U(N); with fewer layers a subset. Costs $O(LN)$ a vector in L dependent steps (Table 1);
    the matrix is never formed to multiply.

    The free parameters are ``theta (*, K)``, ``phi (*, K)`` (the K pairs, layer by layer) and ``phase (*, N)``, real.
    They start uniform in $[-\pi, \pi]$. There is no inverse: a matrix can't be assigned.

    Args:
        n, m: N; ``m``, if given, is N too.
        layers: L, from 1 to N (default).
        batch, dtype, device: of the weight, complex.

    Example:
        >>> q = EURNN(6, layers=4)
        >>> orthogonality_error(q(*q.sample())) < 1e-5
        True
    """

    def __init__(self, n: int, m: int | None = None, *, layers: int | None = None, **like) -> None:
        super().__init__(n, m, **like)
        self.layers = n if layers is None else layers
        if (
            isinstance(layers, bool)
            or not isinstance(self.layers, int)
            or not 1 <= self.layers <= n
        ):
            raise ValueError(
                f"{self._call}: layers must be a whole number between 1 and {n}, got {layers!r}."
            )

    def _table(self, angles: Tensor) -> Tensor:
        """Angles ``(*, K)`` by layer ``(*, L, ⌈N/2⌉)``, with 0 for a coordinate that has no neighbour."""
        if self.n % 2:
            return pad(angles.unflatten(-1, (self.layers, self.n // 2)), (0, 1))
        # Two layers have N - 1 pairs.
        rows = -(-self.layers // 2)
        angles = pad(angles, (0, rows * (self.n - 1) - angles.shape[-1])).unflatten(
            -1, (rows, self.n - 1)
        )
        return (
            pad(angles, (0, 1))
            .unflatten(-1, (2, self.n // 2))
            .flatten(-3, -2)[..., : self.layers, :]
        )

    def _times(self, free: tuple[Tensor, ...], x: Tensor, adjoint: bool) -> Tensor:
        theta, phi, phase = free
        d = self._beside(x, self._turns(phase))
        turn, plane = self._turns(self._table(phi)), self._turns(self._table(theta))
        cos, sin = plane.real.to(turn.dtype), plane.imag.to(turn.dtype)
        if adjoint:
            x = x * d.conj()
            blocks = turn.conj() * cos, turn.conj() * sin, -sin, cos
        else:
            blocks = turn * cos, -sin, turn * sin, cos
        aa, ab, ba, bb = ([self._beside(x, row) for row in block.unbind(-2)] for block in blocks)

        x = pad(x, (0, self.n % 2))
        even, odd = x[..., 0::2], x[..., 1::2]
        for i in range(self.layers) if adjoint else reversed(range(self.layers)):
            # The pairs (1, 2), (3, 4), … lie side by side when the even coordinates move up by one.
            a, b = (odd, even.roll(-1, -1)) if i % 2 else (even, odd)
            a, b = torch.addcmul(aa[i] * a, ab[i], b), torch.addcmul(ba[i] * a, bb[i], b)
            even, odd = (b.roll(1, -1), a) if i % 2 else (a, b)
        x = torch.stack([even, odd], -1).flatten(-2)[..., : self.n]
        return x if adjoint else x * d

    def free(self, matrix: Tensor):
        raise ValueError(
            f"{self._call}: EURNN has no inverse here, so no matrix can be assigned, and init must be 'random'. "
            "Use method='cwy' or 'hr', which reach every unitary matrix."
        )

    def sample(self) -> tuple[Tensor, Tensor, Tensor]:
        pairs = self.layers // 2 * (self.n - 1) + self.layers % 2 * (self.n // 2)
        shapes = (pairs, pairs, self.n)
        real = {"dtype": self.dtype.to_real(), "device": self.device}
        theta, phi, phase = (
            torch.empty(*self.batch, k, **real).uniform_(-math.pi, math.pi) for k in shapes
        )
        return theta, phi, phase

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, layers={self.layers}"
