"""EXPRNN: the matrix exponential."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..ops._linalg import double, nearest_orthogonal
from ..ops.skew import logarithm, rotation
from ..registry import register
from .skew import SkewMap


@register("exprnn", domain="SO(N)", kind="square", paper="Lezcano-Casado and Martínez-Rubio 2019")
class EXPRNN(SkewMap):
    r"""Compute $Q = \exp(A)$, $A = \mathrm{striu}(X) - \mathrm{striu}(X)^\top$: onto SO(N).

    Costs $O(N^3)$ (Table 1), in scaling and squaring. The backward pass takes three products for
    each of the forward pass. Squaring in float32 would lose digits, so it runs in float64 where the
    device has it at a fair speed. An X whose A has a norm above 6.7e7 raises, because rounding
    would spoil its exponential.

    Starts as block-diagonal rotations with angles uniform in $[-\pi, \pi]$ (Henaff et al. 2016).
    Any Q of determinant 1 can be assigned. X is then the upper triangle of its logarithm, with no
    angle above $\pi$.

    Args:
        n, m: N. ``m``, if given, is N too.
        batch, dtype, device: of the weight, real.

    Example:
        >>> q = EXPRNN(6)
        >>> orthogonality_error(q(q.sample())) < 1e-5
        True
    """

    stacked_buffers = ()
    rotations_only = True

    def matrix(self, x: Tensor) -> Tensor:
        return rotation(self.skew(x)).to(x.dtype)

    def free(self, matrix: Tensor) -> Tensor:
        q = nearest_orthogonal(double(matrix))
        if (torch.linalg.slogdet(q).sign < 0).any():
            raise ValueError(
                f"{self._call}: the determinant is -1, and exp of a skew matrix has determinant 1. "
                "Flip the sign of one column, or use method='cwy' or 'dtriv'."
            )
        return logarithm(q).triu(1).to(dtype=matrix.dtype, device=matrix.device)

    def sample(self) -> Tensor:
        return self.in_planes(self.planes(-math.pi, math.pi))
