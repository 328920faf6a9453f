r"""Reflections in blocks of columns, $Q = Q_1\cdots Q_K$ with $Q_k = I - U_k T_k U_k^H$.

Each block is a compact WY transform. Blocks are applied one after the other, which keeps norms, so
that rounding errors add up and do not grow. A single transform of all columns would sum terms that
cancel when vectors are nearly parallel.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ._linalg import (
    Axis,
    adjoint,
    gram,
    over_rows,
    product,
    real_dtype,
    s_from,
    triangular_inverse,
)

COLUMNS = 64
"""The most columns of a block, unless there are too many blocks."""
MOST_BLOCKS = 32
"""The most blocks. More columns make larger ones, so that programs stay small."""


class Normalized(NamedTuple):
    """Hold unit columns ``u (*, N, L)`` and reciprocal norms ``reciprocal (*, 1, L)``."""

    u: Array
    reciprocal: Array


class Blocks(NamedTuple):
    """Hold blocks of unit columns with their factors. The last block may have zero columns.

    Attributes:
        u: ``(*, N, L)``, the unit columns.
        parts: ``(count, *, N, size)``, the columns of each block.
        factors: ``(count, *, size, size)``, the T of each block.
    """

    u: Array
    parts: Array
    factors: Array


def normalize(v: Array, axis: Axis = None) -> Normalized:
    r"""Return columns $u_i = v_i/\lVert v_i\rVert$ and $1/\lVert v_i\rVert$, 0 for a zero column.

    Each column is first scaled by a power of two, so that entries of 1e-30 and 1e30 neither vanish
    nor overflow. Reciprocal norms are bounded, so that gradients of tiny vectors are finite.
    """
    return _normalize(axis, v)


def _normalize_plain(axis: Axis, v: Array) -> Normalized:
    real = real_dtype(v.dtype)
    if v.shape[-2] == 0:
        return Normalized(v, jnp.zeros((*v.shape[:-2], 1, v.shape[-1]), real))
    largest = jnp.max(jnp.abs(v), -2, keepdims=True)
    if axis is not None:
        largest = lax.pmax(largest, axis)
    exponent = jnp.frexp(jnp.where(largest > 0, largest, 1))[1]
    # Two steps: the whole power of two may not be a normal number.
    half = exponent // 2
    first = jnp.ldexp(jnp.ones_like(largest), -half)
    second = jnp.ldexp(jnp.ones_like(largest), half - exponent)
    w = v * first * second
    square = over_rows(jnp.sum((w * w.conj()).real, -2, keepdims=True), axis)
    zero = square == 0
    norm = jnp.sqrt(jnp.where(zero, 1, square))
    inverse_norm = jnp.where(zero, 0, 1 / norm)
    bound = 2.0**-16 / jnp.finfo(real).tiny
    reciprocal = jnp.minimum(inverse_norm * first * second, bound)
    return Normalized(w * inverse_norm, reciprocal.astype(real))


_normalize = jax.custom_jvp(_normalize_plain, nondiff_argnums=(0,))


@_normalize.defjvp
def _normalize_jvp(axis, primals, tangents):
    (v,) = primals
    (dv,) = tangents
    u, reciprocal = _normalize(axis, v)
    # Scaled before the sum, where products of tiny and huge numbers would leave the range.
    scaled = dv * reciprocal
    along = over_rows(jnp.sum((u.conj() * scaled).real, -2, keepdims=True), axis)
    du = scaled - u * along
    return Normalized(u, reciprocal), Normalized(du, -reciprocal * along)


def blocks(u: Array, axis: Axis = None) -> Blocks:
    """Return the blocks of unit columns ``u (*, N, L)``."""
    size = u.shape[-1]
    count = min(-(-size // COLUMNS), MOST_BLOCKS)
    width = -(-size // max(count, 1))
    count = -(-size // max(width, 1))
    padded = jnp.pad(u, [(0, 0)] * (u.ndim - 1) + [(0, width * count - size)])
    parts = jnp.moveaxis(padded.reshape(*u.shape[:-1], count, width), -2, 0)
    return Blocks(u, parts, triangular_inverse(s_from(gram(parts, axis))))


def apply(given: Blocks, x: Array, *, adjointly: bool = False, axis: Axis = None) -> Array:
    """Return Q x, or Q^H x, for the columns of ``x (*, N, K)``."""
    for u, w in _in_order(given, adjointly):
        c = over_rows(product(adjoint(u), x), axis)
        x = x - product(w, c)
    return x


def partial_products(given: Blocks, *, adjointly: bool = False, axis: Axis = None) -> Array:
    r"""Return $W = UT$, or $Y = UT^H$ if adjointly, ``(*, N, L)``.

    Column j of W is twice $u_j$ after the reflections before it, and column j of Y after those
    behind it. So each block is applied to the columns of the blocks that came before in the loop.
    """
    found = given.u[..., :0]
    for u, w in _in_order(given, adjointly):
        c = over_rows(product(adjoint(u), found), axis)
        order = [w, found - product(w, c)]
        if adjointly:
            order.reverse()
        found = jnp.concatenate(order, -1)
    return found[..., : given.u.shape[-1]]


def _in_order(given: Blocks, adjointly: bool) -> list[tuple[Array, Array]]:
    """Return $U_k$ and $U_k T_k$ of the blocks in the order in which Q applies them.

    For the adjoint they are $U_k$ and $U_k T_k^H$.
    """
    factors = given.factors
    if adjointly:
        factors = adjoint(factors)
    pairs = list(zip(given.parts, product(given.parts, factors), strict=True))
    if not adjointly:
        pairs.reverse()
    return pairs
