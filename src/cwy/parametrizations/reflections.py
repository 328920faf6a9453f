"""What the maps by Householder reflections share: vectors, and the signs or phases beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.wy.inverse import vectors_near
from .base import Free, OrthogonalMap

# A matrix rounded to bfloat16 is nearer than this to an orthogonal one, in the spectral norm.
_ROUNDED = 0.02


class ReflectionMap(OrthogonalMap):
    r"""$V \mapsto H(v_1)\cdots H(v_L)\,\mathrm{diag}(s)$, its first M columns.

    For a real weight the signs s are a buffer, +1 until a matrix is assigned that needs others; its determinant
    is $(-1)^L\prod s$. For a complex weight $s = z/|z|$ with a learnable complex ``z``, which makes every unitary matrix
    reachable.

    Args:
        n, m: the matrix is N x M.
        reflections: L; all M by default. Only a square matrix may have fewer.
        batch, dtype, device: of the weight.
    """

    signs: Tensor

    def __init__(self, n: int, m: int | None = None, *, reflections: int | None = None, **like) -> None:
        super().__init__(n, m, **like)
        self.reflections = self.m if reflections is None else reflections
        if isinstance(reflections, bool) or not isinstance(self.reflections, int) or not 1 <= self.reflections <= self.m:
            raise ValueError(f"{self._call}: reflections must be a whole number between 1 and {self.m}, got {reflections!r}.")
        if self.reflections < self.m and not self.may_have_fewer:
            raise ValueError(
                f"{self._call}: it has exactly M = {self.m} reflections, got {reflections}. For fewer use CWY or HR."
            )
        if not self.dtype.is_complex:
            self.register_buffer("signs", torch.ones(*self.batch, self.m, dtype=self.dtype, device=self.device))

    @property
    def may_have_fewer(self) -> bool:
        """Whether L may be below M."""
        return self.m == self.n

    def product(self, v: Tensor, diagonal: Tensor) -> Tensor:
        """The first M columns of the product of reflections, times the diagonal."""
        raise NotImplementedError

    def product_times(self, v: Tensor, x: Tensor, adjoint: bool) -> Tensor:
        """The whole product, N x N, times each vector of x."""
        raise NotImplementedError

    def diagonal(self, z: tuple[Tensor, ...]) -> Tensor:
        """The signs, or the phases of z."""
        return torch.where(z[0] == 0, 1, torch.sgn(z[0])) if z else self.signs

    def matrix(self, v: Tensor, *z: Tensor) -> Tensor:
        return self.product(v, self.diagonal(z))

    def _times(self, free: tuple[Tensor, ...], x: Tensor, adjoint: bool) -> Tensor:
        v, *z = free
        d = self.diagonal(tuple(z))
        d = d.reshape(*self.batch, *[1] * (x.dim() - 1 - len(self.batch)), self.m)
        if adjoint:
            return self.product_times(v, x, True)[..., : self.m] * d.conj()
        x = x * d
        return self.product_times(v, torch.nn.functional.pad(x, (0, self.n - self.m)) if self.n > self.m else x, False)

    def free(self, matrix: Tensor) -> Free:
        return self._free_near(matrix, 0.0)

    def _free_near(self, matrix: Tensor, distance: float) -> Free:
        # Rounding moved the polar factor about as far as the weight, out of what L < N reflections reach.
        slack = 4 * distance if distance <= _ROUNDED else 0.0
        complex_born = not hasattr(self, "signs")
        v, signs = vectors_near(matrix, self.reflections, None if complex_born else self.signs, slack)
        if complex_born:
            return v, signs
        self.signs.copy_(signs)
        return v

    def sample(self) -> Free:
        v = torch.randn(*self.batch, self.n, self.reflections, dtype=self.dtype, device=self.device)
        return (v, torch.ones(*self.batch, self.m, dtype=self.dtype, device=self.device)) if self.dtype.is_complex else v

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, reflections={self.reflections}"
