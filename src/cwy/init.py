"""Initial values by name: orthogonal matrices to start from.

Each takes the matrix's shape N x M, how many reflections it may use, and the usual factory
arguments.
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
    r"""Return exp of a block-diagonal skew matrix (Henaff et al. 2016).

    It turns planes by angles uniform in $[-\pi, \pi]$. With L reflections, $\lfloor L/2\rfloor$
    planes turn.

    Example:
        >>> orthogonality_error(henaff(5)) < 1e-6
        True
    """
    _check_square("henaff", n, m)
    dtype = dtype or torch.get_default_dtype()
    angles = _angles(n, reflections, -math.pi, math.pi, batch=batch, dtype=dtype, device=device)
    return _rotations(n, angles).to(dtype)


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
    r"""Return the Cayley transform of a block-diagonal skew matrix (Helfrich et al. 2018).

    It turns planes by angles t uniform in $[0, \pi/2]$. With L reflections, $\lfloor L/2\rfloor$
    planes turn. With ``exp`` ("helfrich-exp") it is exp of the same matrix, as an option of
    exponential RNNs: the angles are $\tan(t/2)$, at most a radian.

    Example:
        >>> (helfrich(4).diagonal() >= 0).all()
        tensor(True)
    """
    _check_square("helfrich", n, m)
    dtype = dtype or torch.get_default_dtype()
    angles = _angles(n, reflections, 0.0, math.pi / 2, batch=batch, dtype=dtype, device=device)
    if exp:
        angles = (angles / 2).tan()
    return _rotations(n, angles).to(dtype)


def haar(
    n: int,
    m: int | None = None,
    *,
    reflections: int | None = None,
    batch: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    device: Device = None,
) -> Tensor:
    """Draw uniformly from all N x M matrices with orthonormal columns. Needs every reflection.

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
    dtype = dtype or torch.get_default_dtype()
    # LAPACK has no half precision.
    work = torch.promote_types(dtype, torch.float32)
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
    """Return exactly the identity, its first M columns.

    Example:
        >>> identity(2)
        tensor([[1., 0.],
                [0., 1.]])
    """
    return torch.eye(n, _columns("identity", n, m), dtype=dtype, device=device).repeat(*batch, 1, 1)


#: The initial values that are matrices. "random" is not one: it draws the method's free parameters.
MATRICES: dict[str, Callable[..., Tensor]] = {
    "henaff": henaff,
    "helfrich": helfrich,
    "helfrich-exp": partial(helfrich, exp=True),
    "haar": haar,
    "identity": identity,
}


def _columns(call: str, n: int, m: int | None) -> int:
    """Return M, which is N if it is left out."""
    if m is None:
        return n
    if m > n:
        raise ValueError(
            f"{call}: expected M <= N, got {n} x {m}. For a wide matrix, transpose the result."
        )
    return m


def _check_square(call: str, n: int, m: int | None) -> None:
    if m is not None and n != m:
        raise ValueError(
            f"{call}: turning planes makes a square matrix, got {n} x {m}. "
            "Use init='haar' or 'identity'."
        )


def _angles(
    n: int,
    reflections: int | None,
    low: float,
    high: float,
    *,
    batch: Sequence[int],
    dtype: torch.dtype,
    device: Device,
) -> Tensor:
    """Draw angles uniform in [low, high], one for each plane that the reflections can turn."""
    if reflections is None:
        reflections = n
    planes = min(reflections, n) // 2
    return torch.empty(*batch, planes, dtype=dtype.to_real(), device=device).uniform_(low, high)


def _rotations(n: int, angles: Tensor) -> Tensor:
    """Return block-diagonal rotations [[cos, sin], [-sin, cos]] by these angles ``(*, planes)``."""
    *batch, planes = angles.shape
    q = identity(n, batch=batch, dtype=angles.dtype, device=angles.device)
    even = 2 * torch.arange(planes, device=angles.device)
    odd = even + 1
    q[..., even, even] = angles.cos()
    q[..., odd, odd] = angles.cos()
    q[..., even, odd] = angles.sin()
    q[..., odd, even] = -angles.sin()
    return q
