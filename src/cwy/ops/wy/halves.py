r"""Products at tensor-core speed with float32 accuracy: each factor is a sum of two fp16 numbers, hi + lo.

With $a = a_1 + a_2$ and $b = b_1 + b_2$, 22 bits each, $ab = a_2 b_1 + a_1 b_2 + a_1 b_1$ to $2^{-22}$: one product of the
copies (lo, hi, hi) of a, side by side, with (hi, lo, hi) of b, below each other. A power of two makes the most of fp16's
range: columns of U have norm 1, those of W and Y norm 2, entries of T are at most 4, and the gradient is divided by its norm.

Tensor cores round sums towards zero, so that long ones shrink: what is small comes first, the rest in a few pieces that are
added up outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .. import nvrtc
from .blocked import doubles, gram, inverse, signed_
from .fused import KERNELS, normalise, project_

PLAIN, SKEW, LOWER = range(3)  # as in halves.cu
LEFT, RIGHT, EITHER = (3, 0b110), (3, 0b101), (4, 0b1101)  # copies, and which are hi: of EITHER, the last three are LEFT
UNIT = 15  # the power of two with which a number of at most 1 fits; others have room for at most 2, 4 or 8
LEAST, LEAST_THIN = 2048, 4096  # rows from which this is faster: of as many columns, and of few


def halves(x: Tensor, power: int, role: tuple[int, int], below: bool, kind: int = PLAIN, norm: Tensor | None = None) -> Tensor:
    """Copies of hi and lo of $2^{power} x$, ``x (N, L)``; divided by the power of two that a ``norm`` is just below."""
    x, (rows, columns), (copies, order) = x.contiguous(), x.shape, role
    out = x.new_empty((copies * rows, columns) if below else (rows, copies * columns), dtype=torch.float16)
    _launch(rows, columns, x.get_device())(x, out, norm, rows, columns, kind, copies, order, int(below), power)
    return out


@functools.lru_cache(maxsize=1024)
def _launch(rows: int, columns: int, device: int) -> Callable[..., None]:
    with torch.cuda.device(device):
        return nvrtc.kernel(KERNELS / "halves.cu", "halves", {}).prepare((-(-columns // 32), -(-rows // 32)), 256)


def product(left: Tensor, right: Tensor, power: int, sign: int = 1, minus: Tensor | None = None) -> Tensor:
    """``sign`` times ``left @ right`` divided by $2^{power}$, minus ``minus`` if given; in float32."""
    scale, total, step = sign * 2.0**-power, left.shape[1], max(512, left.shape[1] // 96 * 8)
    first = min(total // 3 * 2 + step, total)
    c = torch.empty((left.shape[0], right.shape[1]), dtype=torch.float32, device=left.device) if minus is None else minus
    beta = 0 if minus is None else -1
    c = torch.addmm(c, left[:, :first], right[:first], out_dtype=torch.float32, beta=beta, alpha=scale)
    for at in range(first, total, step):
        piece = slice(at, at + step)
        torch.addmm(c, left[:, piece], right[piece], out_dtype=torch.float32, alpha=scale, out=c)
    return c


def serves(v: Tensor) -> bool:
    """Whether ``v (N, L)`` is so large that this is faster."""
    return _takes(v) and min(v.shape) >= LEAST


def serves_thin(v: Tensor) -> bool:
    """Whether ``v (N, L)`` has so many rows, though few columns, that Q is faster so."""
    return _takes(v) and v.shape[0] >= LEAST_THIN


def _takes(v: Tensor) -> bool:
    """Whether tensor cores take the sizes, add fp16 products up in float32, and know float64."""
    shaped = v.dim() == 2 and v.shape[0] % 8 == v.shape[1] % 8 == 0
    return shaped and doubles(v.get_device()) and not torch.backends.cuda.matmul.allow_fp16_accumulation


def eye_minus(u: Tensor, y: Tensor, diagonal: Tensor | int = 1) -> Tensor:
    """Q = I - U Y^T, with another diagonal in place of I's, if given."""
    return _eye_minus(halves(u, UNIT, LEFT, below=False), halves(y, 14, RIGHT, below=False), diagonal)


def _eye_minus(left: Tensor, right: Tensor, diagonal: Tensor | int = 1) -> Tensor:
    q = product(left, right.mT, 14 + UNIT, sign=-1)
    q.diagonal().add_(diagonal)
    return q


def matrix(v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """u, t, the reciprocal norms, and Q."""
    u, reciprocal = normalise(v)
    t, size, copies = inverse(gram(u)), u.shape[1], halves(u, UNIT, EITHER, below=False)
    w = product(copies[:, size:], halves(t, 13, RIGHT, below=True), 13 + UNIT)
    return u, t, reciprocal, _eye_minus(halves(w, 14, LEFT, below=False), copies[:, : 3 * size])


def wide_gradient(u: Tensor, t: Tensor, reciprocal: Tensor, q: Tensor, z: Tensor, signs: Tensor | None = None) -> Tensor:
    """As :func:`.blocked.wide_gradient`, all divided by the norm of z."""
    n, norm = u.shape[0], torch.linalg.vector_norm(z, dtype=torch.float64)
    left = halves(u, UNIT, LEFT, below=False)
    y = halves(product(left, halves(t, 13, RIGHT, below=False).mT, 13 + UNIT), 14, EITHER, below=True)
    omega = product(halves(q, UNIT, LEFT, below=True).mT, halves(z, UNIT, RIGHT, below=True, norm=norm), 2 * UNIT)
    signed_(omega, signs)
    x = product(halves(omega, 14, LEFT, below=False, kind=SKEW), y[: 3 * n], 14 + 14)
    k = product(y[n:].mT, halves(x, 13, RIGHT, below=True), 14 + 13)
    du = product(left, halves(k, 12, RIGHT, below=True, kind=LOWER), UNIT + 12, minus=x)
    return project_(du, u, reciprocal, norm)
