"""The base of the maps by a skew-symmetric matrix.

They share a free X, of which the strict upper triangle is used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import SquareMap


class SkewMap(SquareMap):
    r"""Map a real X ``(*, N, N)`` through $A = \mathrm{striu}(X) - \mathrm{striu}(X)^\top$.

    Args:
        n, m: N. ``m``, if given, is N too.
        batch, dtype, device: of the weight.
    """

    def __init__(self, n: int, m: int | None = None, **like) -> None:
        super().__init__(n, m, **like)
        if self.dtype.is_complex:
            raise TypeError(
                f"{self._call}: expected a real dtype, got {self.dtype}. "
                "For unitary matrices use CWY."
            )

    @staticmethod
    def skew(x: Tensor) -> Tensor:
        """Return A in the dtype it is computed in: half precision becomes float32."""
        if x.dtype in (torch.float16, torch.bfloat16):
            x = x.float()
        upper = x.triu(1)
        return upper - upper.mT

    def planes(self, low: float, high: float) -> Tensor:
        """Draw angles uniform in [low, high], one for each of the ⌊N/2⌋ coordinate planes."""
        angles = torch.empty(*self.batch, self.n // 2, dtype=self.dtype, device=self.device)
        return angles.uniform_(low, high)

    def in_planes(self, values: Tensor) -> Tensor:
        """Return the X of a block-diagonal A with these values above the diagonal."""
        x = torch.zeros(*self.batch, self.n, self.n, dtype=values.dtype, device=values.device)
        x[..., 0 : self.n - 1 : 2, 1::2].diagonal(dim1=-2, dim2=-1).copy_(values)
        return x
