"""SCORNN: the Cayley transform times a diagonal of signs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import ops
from ..ops._linalg import double, nearest_orthogonal
from ..ops.checks import wrong_sign_in
from ..ops.skew import cayley
from ..registry import register
from .skew import SkewMap

# An entry of A beyond this turns its plane by π to 0.004, where the gradient, shrunk by 4/A², is dead.
_STEEP = 1e3


@register(
    "scornn",
    domain="SO(N) less eigenvalue -1, times fixed signs",
    kind="square",
    paper="Helfrich et al. 2018",
)
class SCORNN(SkewMap):
    r"""$Q = (I + A/2)^{-1}(I - A/2)\,D$, $A = \mathrm{striu}(X) - \mathrm{striu}(X)^\top$, $D = \mathrm{diag}(\pm1)$.

    Covers the Q for which $QD$ has no eigenvalue -1; their determinant is that of D. Costs $O(N^3)$ (Table 1): one
    linear solve, and two products in the backward pass.

    Starts as block-diagonal rotations with angles uniform in $[0, \pi/2]$ (Helfrich et al. 2018), times D. Any orthogonal Q
    can be assigned: where the signs at hand do not reach it, or only with an A so large that its gradient is dead, they are
    replaced by those of its Householder QR decomposition, with which they always do. The signs are a buffer, kept in
    the state dict.

    Args:
        n, m: N; ``m``, if given, is N too.
        negatives: how many of the signs are -1, the last ones, until a Q is assigned that needs others.
        batch, dtype, device: of the weight, real.

    Example:
        >>> q = SCORNN(6, negatives=1)
        >>> w = q(q.sample())
        >>> orthogonality_error(w) < 1e-5, torch.linalg.det(w) < 0
        (True, tensor(True))
    """

    signs: Tensor

    def __init__(self, n: int, m: int | None = None, *, negatives: int = 0, **like) -> None:
        super().__init__(n, m, **like)
        self.negatives = negatives
        if isinstance(negatives, bool) or not isinstance(negatives, int) or not 0 <= negatives <= n:
            raise ValueError(
                f"{self._call}: negatives must be a whole number between 0 and {n}, got {negatives!r}."
            )
        self.register_buffer(
            "signs", torch.ones(*self.batch, n, dtype=self.dtype, device=self.device)
        )
        self.signs[..., n - negatives :] = -1

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        if wrong := wrong_sign_in(state_dict, prefix):
            error_msgs.append(wrong)
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def matrix(self, x: Tensor) -> Tensor:
        return (cayley(self.skew(x)) * self.signs.unsqueeze(-2)).to(x.dtype)

    def free(self, matrix: Tensor) -> Tensor:
        q, signs = nearest_orthogonal(double(matrix)), double(self.signs)
        x = _inverse(q * signs.unsqueeze(-2)).to(matrix.dtype)
        error = (cayley(self.skew(x)) * signs.unsqueeze(-2) - q).abs().amax((-2, -1))
        # Written so that a NaN, from an eigenvalue -1, is not good.
        good = (error <= 4 * torch.finfo(matrix.dtype).eps * self.n**0.5) & (
            x.abs().amax((-2, -1)) <= _STEEP
        )
        if not good.all():
            # With -D from Q = H₁…H_N D, I + Q(-D) is I - H₁…H_N = U T Uᵀ, and U is triangular: never singular.
            signs = torch.where(good[..., None], signs, -ops.householder_vectors(q)[1])
            x = torch.where(
                good[..., None, None], x, _inverse(q * signs.unsqueeze(-2)).to(matrix.dtype)
            )
            self.signs.copy_(signs)
        return x.to(matrix.device)

    def sample(self) -> Tensor:
        return self.in_planes(-2 * (self.planes(0, math.pi / 2) / 2).tan())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, negatives={self.negatives}"


def _inverse(c: Tensor) -> Tensor:
    """The upper triangle of the A whose Cayley transform this is; not finite, or huge, at an eigenvalue -1."""
    eye = torch.eye(c.shape[-1], dtype=c.dtype, device=c.device)
    a = 2 * torch.linalg.solve_ex(eye + c, eye - c).result
    return ((a - a.mT) / 2).triu(1)
