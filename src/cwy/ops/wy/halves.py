r"""Products at tensor-core speed with float32 accuracy: each factor is a sum of two fp16 numbers, hi + lo.

With $a = a_1 + a_2$ and $b = b_1 + b_2$, 22 bits each, $ab = a_2 b_1 + a_1 b_2 + a_1 b_1$ to $2^{-22}$: one product of the
copies (lo, hi, hi) of a, side by side, with (hi, lo, hi) of b, below each other. A power of two makes the most of fp16's
range: columns of U have norm 1, those of Y norm 2, entries of T are at most 4, and the gradient is divided by its norm.

Tensor cores round sums towards zero, so that long ones shrink: what is small comes first, the rest in a few pieces that are
added up outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..._torch import foreach_norm
from .. import _nvrtc
from .blocked import doubles, signed_
from .fused import KERNELS, project_

PLAIN, SKEW, LOWER, BOTH = range(4)  # as in halves.cu
LEFT, RIGHT, EITHER = (
    (3, 0b110),
    (3, 0b101),
    (4, 0b1101),
)  # copies, and which are hi: of EITHER, the last three are LEFT
UNIT = 15  # the power of two with which a number of at most 1 fits; others have room for at most 2, 4 or 8
LONGEST = (
    512  # terms that are added up at once, or a twelfth of all: of more, too many digits are lost
)
LEAST, LEAST_THIN = (
    2**22,
    4096,
)  # entries of v from which this is faster, and rows, if columns are few


def halves(
    x: Tensor,
    power: int,
    role: tuple[int, int],
    below: bool,
    kind: int = PLAIN,
    norm: Tensor | None = None,
) -> Tensor:
    """Copies of hi and lo of $2^{power} x$, ``x (N, L)``; divided by the power of two that a ``norm`` is just below."""
    x, (rows, columns), (copies, order) = _aligned(x), x.shape, role
    out = x.new_empty(
        (copies * rows, columns) if below else (rows, copies * columns), dtype=torch.float16
    )
    _launch(rows, columns, x.get_device())(
        x, out, norm, rows, columns, kind, copies, order, int(below), power
    )
    return out


def _aligned(x: Tensor) -> Tensor:
    """x as the kernel reads it, four numbers at a time."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


@functools.lru_cache(maxsize=1024)
def _launch(rows: int, columns: int, device: int) -> Callable[..., None]:
    with torch.cuda.device(device):
        return _nvrtc.kernel(KERNELS / "halves.cu", "halves", {}).prepare(
            (-(-columns // 64), -(-rows // 64)), 256
        )


def product(
    left: Tensor, right: Tensor, power: int, sign: int = 1, minus: Tensor | None = None
) -> Tensor:
    """``sign`` times ``left @ right`` divided by $2^{power}$; minus ``minus``, if given, in its place. In float32."""
    scale, total = sign * 2.0**-power, left.shape[1]
    step = max(LONGEST, total // 96 * 8)
    first = min(total // 3 * 2 + step, total)
    c = (
        torch.empty((left.shape[0], right.shape[1]), dtype=torch.float32, device=left.device)
        if minus is None
        else minus
    )
    beta = 0 if minus is None else -1
    torch.addmm(
        c, left[:, :first], right[:first], out_dtype=torch.float32, beta=beta, alpha=scale, out=c
    )
    for at in range(first, total, step):
        piece = slice(at, at + step)
        torch.addmm(c, left[:, piece], right[piece], out_dtype=torch.float32, alpha=scale, out=c)
    return c


def serves(v: Tensor) -> bool:
    """Whether ``v (N, L)`` is so large that this is faster; with L above N, sums would be too long for their numbers."""
    return _takes(v) and v.numel() >= LEAST and v.shape[1] <= v.shape[0]


def serves_thin(v: Tensor) -> bool:
    """Whether ``v (N, L)`` has so many rows, though few columns, that Q is faster so."""
    return _takes(v) and v.shape[0] >= LEAST_THIN


def _takes(v: Tensor) -> bool:
    """Whether tensor cores take the sizes, add fp16 products up in float32, and know float64."""
    shaped = v.dim() == 2 and v.shape[0] % 8 == v.shape[1] % 8 == 0
    return (
        shaped
        and doubles(v.get_device())
        and not torch.backends.cuda.matmul.allow_fp16_accumulation
    )


def eye_minus(u: Tensor, y: Tensor, diagonal: Tensor | int) -> Tensor:
    """Q = I - U Y^T, with a diagonal in place of I's."""
    return _eye_minus(halves(u, UNIT, LEFT, below=False), y, diagonal)


def _eye_minus(left: Tensor, y: Tensor, diagonal: Tensor | int) -> Tensor:
    q = product(left, halves(y, 14, RIGHT, below=False).mT, 14 + UNIT, sign=-1)
    q.diagonal().add_(diagonal)
    return q


def matrix(u: Tensor, t: Tensor, signs: Tensor | None) -> tuple[Tensor, Tensor]:
    """As :func:`.blocked.matrix`."""
    left = halves(u, UNIT, LEFT, below=False)
    y = signed_(product(left, halves(t, 13, RIGHT, below=False).mT, 13 + UNIT), signs)
    return _eye_minus(left, y, 1 if signs is None else signs), y


def wide_gradient(
    u: Tensor, y: Tensor, reciprocal: Tensor, q: Tensor, z: Tensor, signs: Tensor | None
) -> Tensor:
    """As :func:`.blocked.wide_gradient`, all divided by the norm of z."""
    n, norm = u.shape[0], _norm(z)
    copies = halves(y, 14, EITHER, below=True)
    omega = product(
        halves(q, UNIT, LEFT, below=True).mT,
        halves(z, UNIT, RIGHT, below=True, norm=norm),
        2 * UNIT,
    )
    x = product(halves(omega, 14, LEFT, below=False, kind=SKEW), copies[: 3 * n], 14 + 14)
    k = product(copies[n:].mT, halves(x, 13, RIGHT, below=True), 14 + 13)
    left, right = halves(u, UNIT, LEFT, below=False), halves(k, 12, RIGHT, below=True, kind=LOWER)
    return project_(product(left, right, UNIT + 12, minus=signed_(x, signs)), u, reciprocal, norm)


def narrow_gradient(
    u: Tensor, t: Tensor, reciprocal: Tensor, y: Tensor, z: Tensor, signs: Tensor | None
) -> Tensor:
    """As :func:`.blocked.narrow_gradient`, all divided by the norm of z."""
    n, z, left = u.shape[0], _aligned(z), halves(u, UNIT, LEFT, below=False)
    norm = _norm(z)
    w = halves(product(left, halves(t, 13, RIGHT, below=True), 13 + UNIT), 14, EITHER, below=True)
    a = product(
        halves(z, UNIT, LEFT, below=False, norm=norm), halves(y, 14, RIGHT, below=True), UNIT + 14
    )
    b = product(halves(z, UNIT, LEFT, below=True, norm=norm).mT, w[: 3 * n], UNIT + 14)
    d = product(w[n:].mT, halves(a, 13, RIGHT, below=True), 14 + 13)
    right = halves(d, 12, RIGHT, below=True, kind=BOTH)
    return project_(
        product(left, right, UNIT + 12, minus=a.add_(signed_(b, signs))), u, reciprocal, norm
    )


def _norm(z: Tensor) -> Tensor:
    (norm,) = foreach_norm([z], 2, torch.float64)  # vector_norm would copy z in float64
    return norm
