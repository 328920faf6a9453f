"""The base of the maps by Householder reflections: vectors, and signs or phases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ..ops._linalg import double
from ..ops.checks import wrong_sign_in
from ..ops.wy.inverse import vectors_near
from .base import Free, OrthogonalMap, PullBack

_ROUNDED = 0.02
"""A matrix rounded to bfloat16 is nearer than this to an orthogonal one, in the spectral norm."""

Length = float | Literal["matched", "raw"]
"""The norm of the vectors at the start, or how it is chosen."""


class ReflectionMap(OrthogonalMap):
    r"""Map $V \mapsto H(v_1)\cdots H(v_L)\,\mathrm{diag}(s)$, its first M columns.

    For a real weight the signs s are a buffer, +1 until a matrix is assigned that needs others. The
    determinant is $(-1)^L\prod s$. For a complex weight $s = z/|z|$ with a learnable complex ``z``,
    which makes every unitary matrix reachable.

    Args:
        n, m: the matrix is N x M.
        reflections: L. All M by default. Only a square matrix may have fewer.
        length: the norm that vectors get when they are sampled or found from a matrix. A step of an
            optimizer moves the matrix in inverse proportion to it. "matched": Adam moves the matrix
            as far as it would move a free weight at the same learning rate, see
            :func:`matched_length`. "raw": Gaussian vectors as drawn, of norm near $\sqrt N$, and
            unit vectors from a matrix, as the paper's experiments start.
        batch, dtype, device: of the weight.
    """

    stacked_buffers = ("signs",)

    signs: Tensor

    def __init__(
        self,
        n: int,
        m: int | None = None,
        *,
        reflections: int | None = None,
        length: Length = "matched",
        **like,
    ) -> None:
        super().__init__(n, m, **like)
        if reflections is None:
            reflections = self.m
        whole = isinstance(reflections, int) and not isinstance(reflections, bool)
        if not whole or not 1 <= reflections <= self.m:
            raise ValueError(
                f"{self._call}: reflections must be a whole number between 1 and {self.m}, "
                f"got {reflections!r}."
            )
        if reflections < self.m and not self.may_have_fewer:
            raise ValueError(
                f"{self._call}: it has exactly M = {self.m} reflections, got {reflections}. "
                "For fewer use CWY or HR."
            )
        if not _is_length(length):
            raise ValueError(
                f"{self._call}: length must be a positive number, 'matched' or 'raw', "
                f"got {length!r}. Leave it out to move Q as far as a free weight."
            )
        self.reflections = reflections
        self.length = length
        if not self.dtype.is_complex:
            self.register_buffer("signs", self._ones())

    def _ones(self) -> Tensor:
        """Return a diagonal of ones."""
        return torch.ones(*self.batch, self.m, dtype=self.dtype, device=self.device)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        if wrong := wrong_sign_in(state_dict, prefix):
            error_msgs.append(wrong)
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    @property
    def may_have_fewer(self) -> bool:
        """Return whether L may be below M."""
        return self.m == self.n

    def product(self, v: Tensor, diagonal: Tensor) -> Tensor:
        """Return the first M columns of the product of reflections, times the diagonal."""
        raise NotImplementedError

    def product_times(self, v: Tensor, x: Tensor, adjoint: bool) -> Tensor:
        """Return the whole product, N x N, times each vector of x."""
        raise NotImplementedError

    def diagonal(self, z: tuple[Tensor, ...]) -> Tensor:
        """Return the signs, or the phases of z."""
        if not z:
            return self.signs
        return torch.where(z[0] == 0, 1, torch.sgn(z[0]))

    def matrix(self, v: Tensor, *z: Tensor) -> Tensor:
        return self.product(v, self.diagonal(z))

    def product_and_pull_back(
        self, v: Tensor, signs: Tensor
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
        """Return :meth:`product` and its backward pass, or None if only autograd knows it."""
        return None

    def matrix_and_pull_back(self, *free: Tensor) -> tuple[Tensor, PullBack] | None:
        if len(free) > 1:
            return None
        found = self.product_and_pull_back(free[0], self.signs)
        if found is None:
            return None
        matrix, product_pull_back = found
        return matrix, lambda gradient: (product_pull_back(gradient),)

    def _times(self, free: tuple[Tensor, ...], x: Tensor, adjoint: bool) -> Tensor:
        v, *z = free
        d = self._between(self.diagonal(tuple(z)), x)
        if adjoint:
            return self.product_times(v, x, True)[..., : self.m] * d.conj()
        x = x * d
        if self.n > self.m:
            x = torch.nn.functional.pad(x, (0, self.n - self.m))
        return self.product_times(v, x, False)

    def free(self, matrix: Tensor) -> Free:
        return self._free_near(matrix, 0.0)

    def _free_near(self, matrix: Tensor, distance: float) -> Free:
        slack = 0.0
        if distance <= _ROUNDED:
            # Rounding moved the polar factor about as far as the weight, out of what L < N
            # reflections reach.
            slack = 4 * distance
        before: Tensor | None = getattr(self, "signs", None)
        v, signs = vectors_near(matrix, self.reflections, before, slack)
        v = v * self._length_of(v)
        if before is None:
            return v, signs
        before.copy_(signs)
        return v

    def _length_of(self, v: Tensor) -> float:
        """Return the length to give to unit vectors found from a matrix."""
        if self.length == "raw":
            return 1.0
        if self.length != "matched":
            return float(self.length)
        overlap = double(v[..., : self.m, :]).abs().square().sum(-2).mean().item()
        return matched_length(self.n, self.m, self.reflections, overlap)

    def sample(self) -> Free:
        v = torch.randn(*self.batch, self.n, self.reflections, dtype=self.dtype, device=self.device)
        if self.length != "raw":
            if self.length == "matched":
                length = matched_length(self.n, self.m, self.reflections)
            else:
                length = float(self.length)
            v = v * (length / torch.linalg.vector_norm(v, dim=-2, keepdim=True))
        if self.dtype.is_complex:
            return v, self._ones()
        return v

    def extra_repr(self) -> str:
        shown = f"{super().extra_repr()}, reflections={self.reflections}"
        if self.length == "matched":
            return shown
        return f"{shown}, length={self.length!r}"


def matched_length(n: int, m: int, reflections: int, overlap: float | None = None) -> float:
    r"""Return the norm of the vectors at which Adam moves Q as far as it would move a free weight.

    Adam's first step is the learning rate in every entry. With random gradients it moves a free
    N x M weight by $\sqrt{NM}$ times that rate, in the Frobenius norm. The matrix of L vectors of
    norm $\rho$ moves as far if
    $$ \rho^2 = 8\,\tfrac LN\,(1 + \tfrac4\pi\tfrac LN) \quad (M = N), \qquad
       \rho = 2\,(a + \tfrac MN)/\sqrt a \quad (M < N). $$

    The page on the mathematics derives it. The result has five significant bits. Then vectors along
    a coordinate axis, as those of the identity, are normalized without rounding.

    Args:
        n, m: the matrix is N x M.
        reflections: L.
        overlap: a, the mean square norm of the first M entries of a unit vector. Random vectors
            have M/N, the default.
    """
    ratio = reflections / n
    if n == m:
        length = math.sqrt(8 * ratio * (1 + 4 / math.pi * ratio))
    else:
        if overlap is None:
            overlap = ratio
        length = 2 * (overlap + ratio) / math.sqrt(overlap)
    mantissa, exponent = math.frexp(length)
    return math.ldexp(round(mantissa * 32) / 32, exponent)


def _is_length(length: object) -> bool:
    if isinstance(length, str):
        return length in ("matched", "raw")
    if isinstance(length, bool) or not isinstance(length, int | float):
        return False
    return 0 < length < math.inf
