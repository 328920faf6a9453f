"""Initial values by name: orthogonal matrices to start from.

Each takes the matrix's shape N x M, how many reflections it may use, and the usual factory arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

Device = torch.device | str | None


def henaff(
    n: int,
    m: int | None = None,
    *,
    reflections: int | None = None,
    batch: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> Tensor:
    r"""exp of a block-diagonal skew matrix: planes turned by angles uniform in $[-\pi, \pi]$ (Henaff et al. 2016).

    With L reflections, $\lfloor L/2\rfloor$ planes turn.

    Example:
        >>> orthogonality_error(henaff(5)) < 1e-6
        True
    """
    return _rotations("henaff", n, m, reflections, batch, dtype, device, -math.pi, math.pi)


def helfrich(
    n: int,
    m: int | None = None,
    *,
    reflections: int | None = None,
    batch: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    device: Device = None,
    exp: bool = False,
) -> Tensor:
    r"""Cayley transform of a block-diagonal skew matrix: planes turned by angles t in $[0, \pi/2]$ (Helfrich et al. 2018).

    With L reflections, $\lfloor L/2\rfloor$ planes turn. With ``exp`` ("helfrich-exp") it is exp of the same matrix, as
    exponential RNNs start when they are told to start so: angles $\tan(t/2)$, at most a radian.

    Example:
        >>> (helfrich(4).diagonal() >= 0).all()
        tensor(True)
    """
    bend = (lambda t: (t / 2).tan()) if exp else (lambda t: t)
    return _rotations("helfrich", n, m, reflections, batch, dtype, device, 0.0, math.pi / 2, bend)


def haar(
    n: int,
    m: int | None = None,
    *,
    reflections: int | None = None,
    batch: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> Tensor:
    """Uniform over all N x M matrices with orthonormal columns. Needs every reflection.

    Example:
        >>> haar(5, 3).shape
        torch.Size([5, 3])
    """
    m = _columns("haar", n, m)
    if reflections is not None and reflections < m:
        raise ValueError(
            f"haar: {reflections} reflections do not reach a Haar-random {n} x {m} matrix. "
            "Leave reflections out, or use init='random'."
        )
    dtype = torch.get_default_dtype() if dtype is None else dtype
    # LAPACK has no half precision.
    work = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    q, r = torch.linalg.qr(torch.randn(*batch, n, m, dtype=work, device=device))
    d = r.diagonal(dim1=-2, dim2=-1)
    return (q * (d / d.abs()).unsqueeze(-2)).to(dtype)


def identity(
    n: int,
    m: int | None = None,
    *,
    reflections: int | None = None,
    batch: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> Tensor:
    """Exactly the identity, its first M columns.

    Example:
        >>> identity(2)
        tensor([[1., 0.],
                [0., 1.]])
    """
    return torch.eye(n, _columns("identity", n, m), dtype=dtype, device=device).repeat(*batch, 1, 1)


#: The initial values that are matrices. "random" is not here: it draws the method's own free parameters.
MATRICES: dict[str, Callable[..., Tensor]] = {
    "henaff": henaff,
    "helfrich": helfrich,
    "helfrich-exp": partial(helfrich, exp=True),
    "haar": haar,
    "identity": identity,
}


def _columns(call: str, n: int, m: int | None) -> int:
    if m is not None and m > n:
        raise ValueError(
            f"{call}: expected M <= N, got {n} x {m}. For a wide matrix, transpose the result."
        )
    return n if m is None else m


def _rotations(
    call: str,
    n: int,
    m: int | None,
    reflections: int | None,
    batch: Sequence[int],
    dtype: torch.dtype | None,
    device: Device,
    low: float,
    high: float,
    bend: Callable[[Tensor], Tensor] = lambda t: t,
) -> Tensor:
    """Block-diagonal rotations [[cos, sin], [-sin, cos]] by angles uniform in [low, high], or a function of such."""
    if m is not None and n != m:
        raise ValueError(
            f"{call}: turning planes makes a square matrix, got {n} x {m}. Use init='haar' or 'identity'."
        )
    dtype = torch.get_default_dtype() if dtype is None else dtype
    planes = (n if reflections is None else min(reflections, n)) // 2
    angle = bend(
        torch.empty(*batch, planes, dtype=dtype.to_real(), device=device).uniform_(low, high)
    )
    q = identity(n, batch=batch, dtype=dtype.to_real(), device=device)
    even = 2 * torch.arange(planes, device=device)
    odd = even + 1
    q[..., even, even] = q[..., odd, odd] = angle.cos()
    q[..., even, odd] = angle.sin()
    q[..., odd, even] = -angle.sin()
    return q.to(dtype)
