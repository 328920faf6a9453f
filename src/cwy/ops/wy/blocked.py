"""For large matrices: torch's products, and kernels for what they leave. Matrices are ``(N, L)`` or ``(B, N, L)``."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .fused import invert_blocks, normalise, project_

WIDTH = 512  # of the blocks of S that one launch inverts
STRIP = 1024  # rows of U^T U at once
LARGE = 2048  # halves from which products without T's zeros are large enough
DOUBLE = (
    (8, 0),
    (9, 0),
    (10, 0),
)  # capabilities with float64 at half the speed of float32, or all of it


def factors(v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u, t and the reciprocal norms."""
    u, reciprocal, wide = normalise(v, doubles(v.get_device()))
    product = gram(u if wide is None else wide)
    del wide  # as large as u twice
    return u, inverse(product), reciprocal


def gram(u: Tensor) -> Tensor:
    """U^T U on and above the diagonal, in float32, added up in float64 if u is that: nearly parallel vectors need it."""
    size = u.shape[-1]
    if u.dtype == torch.float32 or size <= STRIP:
        return (u.mT @ u).float()
    out = u.new_empty((*u.shape[:-2], size, size), dtype=torch.float32)
    for at in range(0, size, STRIP):
        rows = slice(at, at + STRIP)
        out[..., rows, at:] = u[..., rows].mT @ u[..., at:]
    return out


@functools.cache
def doubles(device: int) -> bool:
    """Whether float64 is fast on a GPU."""
    return torch.cuda.get_device_capability(device) in DOUBLE


def inverse(gram: Tensor) -> Tensor:
    r"""$T = S^{-1}$ from $U^\top U$, by halves above the blocks: $T_{12} = -T_{11} S_{12} T_{22}$."""
    t, size, half = invert_blocks(gram, WIDTH), gram.shape[-1], WIDTH
    while half < size:
        for at in range(0, size - half, 2 * half):
            one, two = slice(at, at + half), slice(at + half, at + 2 * half)
            s12, t11, t12, t22 = (
                gram[..., one, two],
                t[..., one, one],
                t[..., one, two],
                t[..., two, two],
            )
            if half < LARGE:
                plus_(t12, t11, s12 @ t22, 0, -1)
                continue
            x, step = torch.empty_like(s12), half // 2
            for i in range(0, x.shape[-1], step):
                plus_(
                    x[..., i : i + step],
                    s12[..., : i + step],
                    t22[..., : i + step, i : i + step],
                    0,
                )
            for i in range(0, half, step):
                plus_(t12[..., i : i + step, :], t11[..., i : i + step, i:], x[..., i:, :], 0, -1)
        half *= 2
    return t


def plus_(c: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta c + alpha a @ b`` in the place of c."""
    return (c.addmm_ if c.dim() == 2 else c.baddbmm_)(a, b, beta=beta, alpha=alpha)


def eye_minus(a: Tensor, b: Tensor, diagonal: Tensor | int = 1) -> Tensor:
    """``I - a @ b`` for ``a (*, N, K)`` and ``b (*, K, M)``, with another diagonal in place of I's, if given."""
    out = plus_(a.new_empty((*a.shape[:-1], b.shape[-1])), a, b, 0, -1)
    out.diagonal(dim1=-2, dim2=-1).add_(diagonal)
    return out


def matrix(u: Tensor, t: Tensor, signs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Q, its columns times signs, and Y = U T^T, its rows times them."""
    y = signed_(u @ t.mT, signs)
    return eye_minus(u, y.mT, 1 if signs is None else signs), y


def signed_(x: Tensor, signs: Tensor | None) -> Tensor:
    """x, its rows times signs, in its place."""
    return x if signs is None else x.mul_(signs.unsqueeze(-1))


def wide_gradient(
    u: Tensor, y: Tensor, reciprocal: Tensor, q: Tensor, z: Tensor, signs: Tensor | None
) -> Tensor:
    """The gradient of v from that of Q, for L >= N, with what :func:`matrix` returned; x and k are twice the README's."""
    omega = q.mT @ z
    x = (omega - omega.mT) @ y
    k = (y.mT @ x).tril_(-1)
    return project_(plus_(signed_(x, signs), u, k, -1), u, reciprocal)


def narrow_gradient(
    u: Tensor, t: Tensor, reciprocal: Tensor, y: Tensor, z: Tensor, signs: Tensor | None
) -> Tensor:
    """The same for L < N."""
    w, a = u @ t, z @ y
    d = (w.mT @ a).triu_(1)
    return factors_gradient(u, reciprocal, a.add_(signed_(z.mT @ w, signs)).neg_(), d)


def truncated_gradient(u: Tensor, t: Tensor, reciprocal: Tensor, z: Tensor) -> Tensor:
    """The gradient of v from that of the first columns of Q."""
    m = u.shape[-1]
    c, y = u.mT @ z, u[..., :m, :] @ t.mT
    d = (t.mT @ c @ y).triu_(1)
    du = plus_(z @ y, u, d + d.mT, -1)
    plus_(du[..., :m, :], c.mT, t, alpha=-1)
    return project_(du, u, reciprocal)


def factors_gradient(u: Tensor, reciprocal: Tensor, du: Tensor, d: Tensor) -> Tensor:
    """The gradient of v from those of u, in its place, and of what is above the diagonal of S."""
    return project_(plus_(du, u, d + d.mT), u, reciprocal)
