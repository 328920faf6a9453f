"""Large matrices by torch's products, and kernels for the rest.

Matrices are ``(N, L)`` or ``(B, N, L)``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _nvrtc
from .._linalg import add_product_, has_fast_double
from . import tiers
from .cooperative import (
    FEW_TILES,
    KERNELS,
    MACROS,
    SHARED_BYTES,
    Source,
    divide,
    next_ticket,
    workspace,
)
from .fused import Factors

# `gram` is U^T U on and above the diagonal, batch x l x l. `t` gets the inverses of the blocks of S
# along the diagonal, and zeros below. `work` holds these blocks, batch x blocks x width x width.
Blocks = _nvrtc.structure(
    "Blocks",
    gram="const float*",
    t="float*",
    work="double*",
    flags="unsigned long long*",
    ticket="unsigned long long",
    batch="int",
    l="int",
    width="int",
)
COLUMN_MACROS = {"COLUMN_THREADS": tiers.COLUMN_THREADS, "COLUMN_WIDTH": tiers.COLUMN_WIDTH}
INVERT_BLOCKS = Source("blocks.cu", "invert_blocks", Blocks, COLUMN_MACROS, batched=False)


class QY(NamedTuple):
    """Hold a matrix Q, its columns times signs, and Y = U T^T, its rows times signs."""

    q: Tensor
    y: Tensor


def factors(v: Tensor) -> Factors:
    """Compute the factors of v."""
    u, reciprocal, in_double = normalize(v, has_fast_double(v.get_device()))
    if in_double is None:
        product = gram(u)
    else:
        product = gram(in_double)
        del in_double  # it is twice as large as u
    return Factors(u, inverse(product), reciprocal)


def gram(u: Tensor) -> Tensor:
    """Return the upper triangle of U^T U in float32.

    A float64 u is added up in float64, which nearly parallel vectors need.
    """
    size = u.shape[-1]
    if u.dtype == torch.float32 or size <= tiers.GRAM_STRIP:
        return (u.mT @ u).float()
    out = u.new_empty((*u.shape[:-2], size, size), dtype=torch.float32)
    for at in range(0, size, tiers.GRAM_STRIP):
        rows = slice(at, at + tiers.GRAM_STRIP)
        out[..., rows, at:] = u[..., rows].mT @ u[..., at:]
    return out


def inverse(gram: Tensor) -> Tensor:
    r"""Return $T = S^{-1}$ from $U^\top U$.

    Above the blocks it is recursive: $T_{12} = -T_{11} S_{12} T_{22}$.
    """
    half = tiers.INVERTED_BLOCK
    t = invert_blocks(gram, half)
    size = gram.shape[-1]
    while half < size:
        for at in range(0, size - half, 2 * half):
            one = slice(at, at + half)
            two = slice(at + half, at + 2 * half)
            _join(gram[..., one, two], t[..., one, one], t[..., one, two], t[..., two, two])
        half *= 2
    return t


def _join(s12: Tensor, t11: Tensor, t12: Tensor, t22: Tensor) -> None:
    """Write $-T_{11} S_{12} T_{22}$ into ``t12``. Large products skip the zeros of T."""
    half = s12.shape[-2]
    if half < tiers.CUT_INVERSE:
        add_product_(t12, t11, s12 @ t22, 0, -1)
        return
    x = torch.empty_like(s12)
    step = half // 2
    for i in range(0, x.shape[-1], step):
        columns = slice(i, i + step)
        left = s12[..., : i + step]
        add_product_(x[..., columns], left, t22[..., : i + step, columns], 0)
    for i in range(0, half, step):
        rows = slice(i, i + step)
        add_product_(t12[..., rows, :], t11[..., rows, i:], x[..., i:, :], 0, -1)


def invert_blocks(gram: Tensor, width: int) -> Tensor:
    r"""Invert the blocks of ``width`` along the diagonal of S, for ``gram`` $= U^\top U$.

    Entries below the diagonal are zero. Entries above the blocks are unspecified.
    """
    *batch, _, size = gram.shape
    count = math.prod(batch)
    blocks = -(-size // width)
    division = divide(INVERT_BLOCKS, count * blocks, width, width, gram.get_device())
    t = torch.empty_like(gram)
    work = workspace(gram, division.blocks, count * blocks * width * width)
    division.launch(
        Blocks(
            gram=gram.data_ptr(),
            t=t.data_ptr(),
            work=work.numbers,
            flags=work.flags,
            ticket=next_ticket(),
            batch=count,
            l=size,
            width=width,
        )
    )
    return t


class Normalized(NamedTuple):
    """Hold unit columns, their reciprocal norms, and a float64 copy of the columns if asked for."""

    u: Tensor
    reciprocal: Tensor
    in_double: Tensor | None


def normalize(v: Tensor, widen: bool) -> Normalized:
    """Return the same as :func:`.composite.normalize`, for matrices of many columns."""
    v = v.contiguous()
    *batch, n, size = v.shape
    u = torch.empty_like(v)
    reciprocal = v.new_empty((*batch, 1, size))
    in_double = None
    if widen:
        in_double = torch.empty_like(v, dtype=torch.float64)
    count = math.prod(batch)
    launch = _over_columns("normalize", count, size, v.get_device())
    launch(v, u, in_double, reciprocal, count, n, size)
    return Normalized(u, reciprocal, in_double)


def project_(du: Tensor, u: Tensor, reciprocal: Tensor, norm: Tensor | None = None) -> Tensor:
    """Replace the gradient of u by that of v, for matrices of many columns.

    With a ``norm`` du came divided by the power of two just above it, as in :mod:`.split_fp16`.
    """
    *batch, n, size = u.shape
    count = math.prod(batch)
    launch = _over_columns("project", count, size, u.get_device())
    launch(u, reciprocal, du, norm, count, n, size)
    return du


@functools.lru_cache(maxsize=1024)
def _over_columns(name: str, count: int, size: int, device: int) -> Callable[..., None]:
    macros = MACROS | FEW_TILES.macros | COLUMN_MACROS
    blocks = count * -(-size // tiers.COLUMN_WIDTH)
    with torch.cuda.device(device):
        kernel = _nvrtc.kernel(
            KERNELS / "blocks.cu", name, macros, SHARED_BYTES, structures=(Blocks,)
        )
        return kernel.prepare((blocks, 1), tiers.COLUMN_THREADS)


def eye_minus(a: Tensor, b: Tensor, signs: Tensor | None = None) -> Tensor:
    """Return ``I - a @ b``, or ``diag(signs) - a @ b``, for ``a (*, N, K)`` and ``b (*, K, M)``."""
    out = add_product_(a.new_empty((*a.shape[:-1], b.shape[-1])), a, b, 0, -1)
    add_diagonal_(out, signs)
    return out


def add_diagonal_(x: Tensor, signs: Tensor | None) -> None:
    """Add signs, or ones, to the diagonal of x."""
    diagonal = x.diagonal(dim1=-2, dim2=-1)
    if signs is None:
        diagonal.add_(1)
    else:
        diagonal.add_(signs)


def sign_rows_(x: Tensor, signs: Tensor | None) -> Tensor:
    """Multiply the rows of x by signs in place."""
    if signs is None:
        return x
    return x.mul_(signs.unsqueeze(-1))


def matrix(u: Tensor, t: Tensor, signs: Tensor | None) -> QY:
    """Form Q and Y from factors."""
    y = sign_rows_(u @ t.mT, signs)
    return QY(matrix_from_y(u, y, signs), y)


def matrix_from_y(u: Tensor, y: Tensor, signs: Tensor | None) -> Tensor:
    """Form Q, its columns times signs, from U and Y, its rows times signs."""
    return eye_minus(u, y.mT, signs)


def wide_gradient(
    u: Tensor, y: Tensor, reciprocal: Tensor, q: Tensor, z: Tensor, signs: Tensor | None
) -> Tensor:
    """Compute the gradient of v from that of Q, for L >= N, with what :func:`matrix` returned.

    x and k are twice the README's.
    """
    omega = q.mT @ z
    x = (omega - omega.mT) @ y
    k = (y.mT @ x).tril_(-1)
    return project_(add_product_(sign_rows_(x, signs), u, k, -1), u, reciprocal)


def narrow_gradient(
    u: Tensor, t: Tensor, reciprocal: Tensor, y: Tensor, z: Tensor, signs: Tensor | None
) -> Tensor:
    """Compute the gradient of v from that of Q, for L < N, with what :func:`matrix` returned."""
    w = u @ t
    a = z @ y
    d = (w.mT @ a).triu_(1)
    du = a.add_(sign_rows_(z.mT @ w, signs)).neg_()
    return factors_gradient(u, reciprocal, du, d)


def truncated_gradient(u: Tensor, t: Tensor, reciprocal: Tensor, z: Tensor) -> Tensor:
    """Compute the gradient of v from that of the first columns of Q."""
    m = u.shape[-1]
    c = u.mT @ z
    y = u[..., :m, :] @ t.mT
    d = (t.mT @ c @ y).triu_(1)
    du = add_product_(z @ y, u, d + d.mT, -1)
    add_product_(du[..., :m, :], c.mT, t, alpha=-1)
    return project_(du, u, reciprocal)


def factors_gradient(u: Tensor, reciprocal: Tensor, du: Tensor, d: Tensor) -> Tensor:
    """Compute the gradient of v from that of u, in its place, and of the upper triangle of S."""
    return project_(add_product_(du, u, d + d.mT), u, reciprocal)
