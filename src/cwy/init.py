"""Initial values by name: orthogonal matrices to start from.

Each takes the matrix's shape, how many reflections it may need, and the usual factory arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def _rotations(
    call: str, n: int, m: int, reflections: int | None, batch: Sequence[int], dtype, device, low: float, high: float
) -> Tensor:
    """Block-diagonal rotations [[cos, sin], [-sin, cos]] with angles uniform in [low, high]."""
    if n != m:
        raise ValueError(f"{call}: rotations of planes make a square matrix, got {n} x {m}. Use init='haar' or 'identity'.")
    planes = (n if reflections is None else min(reflections, n)) // 2
    real = dtype.to_real()
    angle = torch.empty(*batch, planes, dtype=real, device=device).uniform_(low, high)
    q = torch.eye(n, dtype=real, device=device).repeat(*batch, 1, 1)
    even, odd = torch.arange(0, 2 * planes, 2, device=device), torch.arange(1, 2 * planes, 2, device=device)
    q[..., even, even] = q[..., odd, odd] = angle.cos()
    q[..., even, odd] = angle.sin()
    q[..., odd, even] = -angle.sin()
    return q.to(dtype)


def henaff(
    n: int, m: int, *, reflections: int | None = None, batch: Sequence[int] = (), dtype: torch.dtype, device=None
) -> Tensor:
    r"""exp of a block-diagonal skew matrix with angles uniform in $[-\pi, \pi]$ (Henaff et al. 2016).

    With L reflections, $\lfloor L/2\rfloor$ planes turn.
    """
    return _rotations("henaff", n, m, reflections, batch, dtype, device, -math.pi, math.pi)


def helfrich(
    n: int, m: int, *, reflections: int | None = None, batch: Sequence[int] = (), dtype: torch.dtype, device=None
) -> Tensor:
    r"""Cayley transform of a block-diagonal skew matrix: plane rotations by angles uniform in $[0, \pi/2]$ (Helfrich et al. 2018).

    With L reflections, $\lfloor L/2\rfloor$ planes turn.
    """
    return _rotations("helfrich", n, m, reflections, batch, dtype, device, 0.0, math.pi / 2)


def haar(
    n: int, m: int, *, reflections: int | None = None, batch: Sequence[int] = (), dtype: torch.dtype, device=None
) -> Tensor:
    """Uniform over all N x M matrices with orthonormal columns. Needs every reflection."""
    if reflections is not None and reflections < m:
        raise ValueError(
            f"haar: {reflections} reflections do not reach a Haar-random {n} x {m} matrix. Leave reflections out, or use init='random'."
        )
    q, r = torch.linalg.qr(torch.randn(*batch, n, m, dtype=_single(dtype), device=device))
    d = r.diagonal(dim1=-2, dim2=-1)
    return (q * (d / d.abs()).unsqueeze(-2)).to(dtype)


def identity(
    n: int, m: int, *, reflections: int | None = None, batch: Sequence[int] = (), dtype: torch.dtype, device=None
) -> Tensor:
    """Exactly the identity (its first M columns)."""
    return torch.eye(n, m, dtype=dtype, device=device).repeat(*batch, 1, 1)


def _single(dtype: torch.dtype) -> torch.dtype:
    # LAPACK has no half precision.
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


#: The initial values that are matrices. "random" is not here: it draws the method's own free parameters.
MATRICES: dict[str, Callable[..., Tensor]] = {"henaff": henaff, "helfrich": helfrich, "haar": haar, "identity": identity}
