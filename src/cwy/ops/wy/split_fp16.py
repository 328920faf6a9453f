r"""Products at tensor-core speed with float32 accuracy: each factor is split into two fp16 parts.

With $a = a_1 + a_2$ and $b = b_1 + b_2$, a high and a low part, 22 bits in all,
$ab = a_2 b_1 + a_1 b_2 + a_1 b_1$ to $2^{-22}$. It is one product: the copies (low, high, high) of
a, side by side, times (high, low, high) of b, below each other. A power of two makes the most of
fp16's range. Columns of U have norm 1, those of Y norm 2, entries of T are at most 4, and the
gradient is divided by its norm.

Tensor cores round sums toward zero, so long sums shrink. The small terms come first. The rest is
added up in a few pieces outside.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..._torch import foreach_norm
from .. import _nvrtc
from . import tiers
from .blocked import QY, add_diagonal_, project_, sign_rows_
from .cooperative import KERNELS


class Kind(enum.IntEnum):
    """Name what is split, by the values of the kernel's argument ``kind``."""

    PLAIN = 0  # x
    SKEW = 1  # x - x^T
    LOWER = 2  # what is below the diagonal of x
    BOTH = 3  # what is above the diagonal of x, and its transpose


class Copies(NamedTuple):
    """Describe how many copies of an operand there are, and in which the high part is, as bits."""

    count: int
    high: int


LEFT = Copies(3, 0b110)
RIGHT = Copies(3, 0b101)
EITHER = Copies(4, 0b1101)  # the first three are RIGHT and the last three LEFT

# The powers of two with which numbers of at most 1, 2, 4 and 8 fit into fp16.
TO_1 = 15
TO_2 = 14
TO_4 = 13
TO_8 = 12

THREADS = tiers.SPLIT_TILE // 4 * tiers.SPLIT_TILE_ROWS
MACROS = {
    **{kind.name: kind.value for kind in Kind},
    "TILE": tiers.SPLIT_TILE,
    "TILE_ROWS": tiers.SPLIT_TILE_ROWS,
}


def split(
    x: Tensor,
    power: int,
    copies: Copies,
    *,
    below: bool = False,
    kind: Kind = Kind.PLAIN,
    norm: Tensor | None = None,
) -> Tensor:
    """Return copies of the high and low parts of $2^{power} x$.

    Args:
        x: ``(N, L)``.
        power: the exponent. TO_1 fits numbers of at most 1.
        copies: how many of each part.
        below: whether the copies are below each other. Otherwise they are side by side.
        kind: what of x is split.
        norm: if given, x is also divided by the power of two just above it.
    """
    x = _aligned(x)
    rows, columns = x.shape
    shape = (rows, copies.count * columns)
    if below:
        shape = (copies.count * rows, columns)
    out = x.new_empty(shape, dtype=torch.float16)
    launch = _launch(rows, columns, x.get_device())
    launch(x, out, norm, rows, columns, kind, copies.count, copies.high, int(below), power)
    return out


def _aligned(x: Tensor) -> Tensor:
    """Return x as the kernel reads it, four numbers at a time."""
    x = x.contiguous()
    if x.data_ptr() % 16:
        return x.clone()
    return x


@functools.lru_cache(maxsize=1024)
def _launch(rows: int, columns: int, device: int) -> Callable[..., None]:
    grid = (-(-columns // tiers.SPLIT_TILE), -(-rows // tiers.SPLIT_TILE))
    with torch.cuda.device(device):
        kernel = _nvrtc.kernel(KERNELS / "split_fp16.cu", "split_fp16", MACROS)
        return kernel.prepare(grid, THREADS)


def product(
    left: Tensor, right: Tensor, power: int, sign: int = 1, minus: Tensor | None = None
) -> Tensor:
    """Return ``sign`` times ``left @ right`` divided by $2^{power}$, in float32.

    Args:
        left, right: copies that :func:`split` made.
        power: the sum of their exponents.
        sign: 1 or -1.
        minus: if given, it is subtracted, and replaced by the result.
    """
    scale = sign * 2.0**-power
    total = left.shape[1]
    step = max(tiers.SPLIT_TERMS, total // (8 * tiers.SPLIT_PIECES) * 8)
    first = min(total // 3 * 2 + step, total)
    if minus is None:
        beta = 0
        c = torch.empty((left.shape[0], right.shape[1]), dtype=torch.float32, device=left.device)
    else:
        beta = -1
        c = minus
    torch.addmm(
        c, left[:, :first], right[:first], out_dtype=torch.float32, beta=beta, alpha=scale, out=c
    )
    for at in range(first, total, step):
        piece = slice(at, at + step)
        torch.addmm(c, left[:, piece], right[piece], out_dtype=torch.float32, alpha=scale, out=c)
    return c


def matrix_from_y(u: Tensor, y: Tensor, signs: Tensor | None) -> Tensor:
    """Return the same as :func:`.blocked.matrix_from_y`."""
    return _matrix_from_y(split(u, TO_1, LEFT), y, signs)


def _matrix_from_y(left: Tensor, y: Tensor, signs: Tensor | None) -> Tensor:
    q = product(left, split(y, TO_2, RIGHT).mT, TO_2 + TO_1, sign=-1)
    add_diagonal_(q, signs)
    return q


def matrix(u: Tensor, t: Tensor, signs: Tensor | None) -> QY:
    """Return the same as :func:`.blocked.matrix`."""
    left = split(u, TO_1, LEFT)
    y = sign_rows_(product(left, split(t, TO_4, RIGHT).mT, TO_4 + TO_1), signs)
    return QY(_matrix_from_y(left, y, signs), y)


def wide_gradient(
    u: Tensor, y: Tensor, reciprocal: Tensor, q: Tensor, z: Tensor, signs: Tensor | None
) -> Tensor:
    """Compute :func:`.blocked.wide_gradient`, with z divided by its norm until the end."""
    n = u.shape[0]
    norm = _norm(z)
    copies = split(y, TO_2, EITHER, below=True)
    omega = product(
        split(q, TO_1, LEFT, below=True).mT,
        split(z, TO_1, RIGHT, below=True, norm=norm),
        TO_1 + TO_1,
    )
    x = product(split(omega, TO_2, LEFT, kind=Kind.SKEW), copies[: 3 * n], TO_2 + TO_2)
    k = product(copies[n:].mT, split(x, TO_4, RIGHT, below=True), TO_2 + TO_4)
    left = split(u, TO_1, LEFT)
    right = split(k, TO_8, RIGHT, below=True, kind=Kind.LOWER)
    du = product(left, right, TO_1 + TO_8, minus=sign_rows_(x, signs))
    return project_(du, u, reciprocal, norm)


def narrow_gradient(
    u: Tensor, t: Tensor, reciprocal: Tensor, y: Tensor, z: Tensor, signs: Tensor | None
) -> Tensor:
    """Return the same as :func:`.blocked.narrow_gradient`, as :func:`wide_gradient` does."""
    n = u.shape[0]
    z = _aligned(z)
    left = split(u, TO_1, LEFT)
    norm = _norm(z)
    w = product(left, split(t, TO_4, RIGHT, below=True), TO_4 + TO_1)
    w = split(w, TO_2, EITHER, below=True)  # which frees the float32 one
    a = product(split(z, TO_1, LEFT, norm=norm), split(y, TO_2, RIGHT, below=True), TO_1 + TO_2)
    b = product(split(z, TO_1, LEFT, below=True, norm=norm).mT, w[: 3 * n], TO_1 + TO_2)
    d = product(w[n:].mT, split(a, TO_4, RIGHT, below=True), TO_2 + TO_4)
    right = split(d, TO_8, RIGHT, below=True, kind=Kind.BOTH)
    du = product(left, right, TO_1 + TO_8, minus=a.add_(sign_rows_(b, signs)))
    return project_(du, u, reciprocal, norm)


def _norm(z: Tensor) -> Tensor:
    (norm,) = foreach_norm([z], 2, torch.float64)  # vector_norm would copy z in float64
    return norm
