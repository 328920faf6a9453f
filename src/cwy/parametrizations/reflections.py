"""What the maps by Householder reflections share: vectors, and the signs or phases beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from .base import Free, OrthogonalMap


class ReflectionMap(OrthogonalMap):
    r"""$V \mapsto H(v_1)\cdots H(v_L)\,\mathrm{diag}(s)$, its first M columns.

    For a real weight the signs s are a buffer, +1 until a matrix is assigned that needs others; its determinant
    is $(-1)^L\prod s$. For a complex weight they are $e^{i\varphi}$ with a learnable ``phase``, which makes
    every unitary matrix reachable.

    Args:
        n, m: the matrix is N x M.
        reflections: L; all M by default. Only a square matrix may have fewer.
        batch, dtype, device: of the weight.
    """

    signs: Tensor

    def __init__(self, n: int, m: int | None = None, *, reflections: int | None = None, **like) -> None:
        super().__init__(n, m, **like)
        self.reflections = self.m if reflections is None else reflections
        if not 1 <= self.reflections <= self.m:
            raise ValueError(f"{self._call}: reflections must be between 1 and {self.m}, got {reflections}.")
        if self.m < self.n and self.reflections != self.m:
            raise ValueError(
                f"{self._call}: a matrix that is not square has exactly M = {self.m} reflections, got {reflections}."
            )
        if not self.dtype.is_complex:
            self.register_buffer("signs", torch.ones(*self.batch, self.m, dtype=self.dtype, device=self.device))

    def product(self, v: Tensor) -> Tensor:
        """The first M columns of the product of reflections."""
        raise NotImplementedError

    def product_times(self, v: Tensor, x: Tensor, adjoint: bool) -> Tensor:
        """The whole product, N x N, times each vector of x."""
        raise NotImplementedError

    def diagonal(self, phase: tuple[Tensor, ...]) -> Tensor:
        if not phase:
            return self.signs
        # module.to(torch.complex64) makes every parameter complex, the angles too.
        angle = phase[0].real if phase[0].is_complex() else phase[0]
        return torch.polar(torch.ones_like(angle), angle)

    def matrix(self, v: Tensor, *phase: Tensor) -> Tensor:
        return self.product(v) * self.diagonal(phase).unsqueeze(-2)

    def _times(self, free: tuple[Tensor, ...], x: Tensor, adjoint: bool) -> Tensor:
        v, *phase = free
        d = self.diagonal(tuple(phase))
        d = d.reshape(*self.batch, *[1] * (x.dim() - 1 - len(self.batch)), self.m)
        if adjoint:
            return self.product_times(v, x, True)[..., : self.m] * d.conj()
        return self.product_times(v, torch.nn.functional.pad(x * d, (0, self.n - self.m)), False)

    def free(self, matrix: Tensor) -> Free:
        hint = None if matrix.is_complex() else self.signs
        v, signs = ops.householder_vectors(matrix, self.reflections, signs=hint)
        if matrix.is_complex():
            return v, signs.angle()
        self.signs.copy_(signs)
        return v

    def sample(self) -> Free:
        v = torch.randn(*self.batch, self.n, self.reflections, dtype=self.dtype, device=self.device)
        if self.dtype.is_complex:
            return v, torch.zeros(*self.batch, self.m, dtype=self.dtype.to_real(), device=self.device)
        self.signs.fill_(1)
        return v

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, reflections={self.reflections}"
