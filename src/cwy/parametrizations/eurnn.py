"""EURNN: layers of rotations of neighboring coordinates."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..registry import register
from .base import ComplexMap


@register(
    "eurnn",
    domain="subset of U(N), with L = N: U(N)",
    kind="square",
    real=False,
    complex=True,
    paper="Jing et al. 2017",
)
class EURNN(ComplexMap):
    r"""Compute $Q = D F_1\cdots F_L$ with phases D and layers F of rotations of neighbors.

    The pairs are (0, 1), (2, 3), … in $F_1, F_3, …$ and (1, 2), (3, 4), … in $F_2, F_4, …$. Each is
    turned by
    $$ \begin{bmatrix}
       e^{i\varphi}\cos\theta & -\sin\theta \\ e^{i\varphi}\sin\theta & \cos\theta
       \end{bmatrix}. $$

    With $e^{i\varphi}$ in a row instead, D would absorb that of $F_1$, and U(N) would not be
    covered. With L = N, that is $N^2$ angles in all, it covers U(N). With fewer layers it covers a
    subset. Costs $O(LN)$ per vector in L dependent steps (Table 1). The matrix is never formed to
    multiply.

    The free parameters are ``theta (*, K)``, ``phi (*, K)`` (the K pairs, layer by layer) and
    ``phase (*, N)``, real. They start uniform in $[-\pi, \pi]$. There is no inverse: a matrix can't
    be assigned.

    Args:
        n, m: N. ``m``, if given, is N too.
        layers: L, from 1 to N (default).
        batch, dtype, device: of the weight, complex.

    Example:
        >>> q = EURNN(6, layers=4)
        >>> orthogonality_error(q(*q.sample())) < 1e-5
        True
    """

    stacked_buffers = ()

    def __init__(self, n: int, m: int | None = None, *, layers: int | None = None, **like) -> None:
        super().__init__(n, m, **like)
        if layers is None:
            layers = n
        whole = isinstance(layers, int) and not isinstance(layers, bool)
        if not whole or not 1 <= layers <= n:
            raise ValueError(
                f"{self._call}: layers must be a whole number between 1 and {n}, got {layers!r}."
            )
        self.layers = layers

    def _table(self, angles: Tensor) -> Tensor:
        """Return angles ``(*, K)`` by layer, ``(*, L, ⌈N/2⌉)``.

        A coordinate that has no neighbor gets 0.
        """
        half = self.n // 2
        if self.n % 2:
            return pad(angles.unflatten(-1, (self.layers, half)), (0, 1))
        # Two layers have N - 1 pairs.
        rows = -(-self.layers // 2)
        missing = rows * (self.n - 1) - angles.shape[-1]
        angles = pad(angles, (0, missing)).unflatten(-1, (rows, self.n - 1))
        table = pad(angles, (0, 1)).unflatten(-1, (2, half)).flatten(-3, -2)
        return table[..., : self.layers, :]

    def _times(self, free: tuple[Tensor, ...], x: Tensor, adjoint: bool) -> Tensor:
        theta, phi, phase = free
        d = self._between(self._turns(phase), x)
        turn = self._turns(self._table(phi))
        plane = self._turns(self._table(theta))
        cos = plane.real.to(turn.dtype)
        sin = plane.imag.to(turn.dtype)
        order = range(self.layers)
        if adjoint:
            x = x * d.conj()
            blocks = turn.conj() * cos, turn.conj() * sin, -sin, cos
        else:
            order = reversed(order)
            blocks = turn * cos, -sin, turn * sin, cos
        aa, ab, ba, bb = ([self._between(row, x) for row in block.unbind(-2)] for block in blocks)

        x = pad(x, (0, self.n % 2))
        even = x[..., 0::2]
        odd = x[..., 1::2]
        for i in order:
            if i % 2:
                # The pairs (1, 2), (3, 4), … meet when the even coordinates move up by one.
                a, b = odd, even.roll(-1, -1)
            else:
                a, b = even, odd
            a, b = torch.addcmul(aa[i] * a, ab[i], b), torch.addcmul(ba[i] * a, bb[i], b)
            if i % 2:
                even, odd = b.roll(1, -1), a
            else:
                even, odd = a, b
        x = torch.stack([even, odd], -1).flatten(-2)[..., : self.n]
        if adjoint:
            return x
        return x * d

    def free(self, matrix: Tensor):
        raise ValueError(
            f"{self._call}: EURNN has no inverse here, so no matrix can be assigned, "
            "and init must be 'random'. "
            "Use method='cwy' or 'hr', which reach every unitary matrix."
        )

    def sample(self) -> tuple[Tensor, Tensor, Tensor]:
        pairs = self.layers // 2 * (self.n - 1) + self.layers % 2 * (self.n // 2)
        theta = self._angles(pairs)
        phi = self._angles(pairs)
        phase = self._angles(self.n)
        return theta, phi, phase

    def _angles(self, count: int) -> Tensor:
        """Draw angles uniform in [-π, π]."""
        dtype = self.dtype.to_real()
        angles = torch.empty(*self.batch, count, dtype=dtype, device=self.device)
        return angles.uniform_(-math.pi, math.pi)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, layers={self.layers}"
