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

_STEEP = 1e3
"""The largest entry of A that is taken.

A larger one turns its plane by π to 0.004, where the gradient, shrunk by 4/A², is dead.
"""


@register(
    "scornn",
    domain="SO(N) less eigenvalue -1, times fixed signs",
    kind="square",
    paper="Helfrich et al. 2018",
)
class SCORNN(SkewMap):
    r"""Compute $Q = (I + A/2)^{-1}(I - A/2)\,D$ with a skew-symmetric A and signs $D$.

    Here $A = \mathrm{striu}(X) - \mathrm{striu}(X)^\top$ and $D = \mathrm{diag}(\pm1)$. Covers
    the Q for which $QD$ has no eigenvalue -1. Their determinant is that of D. Costs $O(N^3)$
    (Table 1): one linear solve, and two products in the backward pass.

    Starts as block-diagonal rotations with angles uniform in $[0, \pi/2]$ (Helfrich et al. 2018),
    times D. Any orthogonal Q can be assigned. The signs at hand may not reach it, or only with an A
    so large that its gradient is dead. Then they are replaced by those of its Householder QR
    decomposition, which always reach it. The signs are a buffer, kept in the state dict.

    Args:
        n, m: N. ``m``, if given, is N too.
        negatives: how many of the signs are -1, the last ones, until a Q is assigned that needs
            others.
        batch, dtype, device: of the weight, real.

    Example:
        >>> q = SCORNN(6, negatives=1)
        >>> w = q(q.sample())
        >>> orthogonality_error(w) < 1e-5, torch.linalg.det(w) < 0
        (True, tensor(True))
    """

    stacked_buffers = ("signs",)

    signs: Tensor

    def __init__(self, n: int, m: int | None = None, *, negatives: int = 0, **like) -> None:
        super().__init__(n, m, **like)
        whole = isinstance(negatives, int) and not isinstance(negatives, bool)
        if not whole or not 0 <= negatives <= n:
            raise ValueError(
                f"{self._call}: negatives must be a whole number between 0 and {n}, "
                f"got {negatives!r}."
            )
        self.negatives = negatives
        signs = torch.ones(*self.batch, n, dtype=self.dtype, device=self.device)
        self.register_buffer("signs", signs)
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
        q = nearest_orthogonal(double(matrix))
        signs = double(self.signs)
        x = _inverse(q * signs.unsqueeze(-2)).to(matrix.dtype)
        error = (cayley(self.skew(x)) * signs.unsqueeze(-2) - q).abs().amax((-2, -1))
        allowed = 4 * torch.finfo(matrix.dtype).eps * self.n**0.5
        # Written so that a NaN, from an eigenvalue -1, is not good.
        good = (error <= allowed) & (x.abs().amax((-2, -1)) <= _STEEP)
        if not good.all():
            # With -D from Q = H₁…H_N D, I + Q(-D) is I - H₁…H_N = U T Uᵀ. U is triangular, so it is
            # never singular.
            signs = torch.where(good[..., None], signs, -ops.householder_vectors(q)[1])
            reached = _inverse(q * signs.unsqueeze(-2)).to(matrix.dtype)
            x = torch.where(good[..., None, None], x, reached)
            self.signs.copy_(signs)
        return x.to(matrix.device)

    def sample(self) -> Tensor:
        return self.in_planes(-2 * (self.planes(0, math.pi / 2) / 2).tan())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, negatives={self.negatives}"


def _inverse(c: Tensor) -> Tensor:
    """Return the upper triangle of the A whose Cayley transform this is.

    An eigenvalue -1 makes it infinite, or huge.
    """
    eye = torch.eye(c.shape[-1], dtype=c.dtype, device=c.device)
    a = 2 * torch.linalg.solve_ex(eye + c, eye - c).result
    return ((a - a.mT) / 2).triu(1)
