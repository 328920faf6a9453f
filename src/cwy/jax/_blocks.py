r"""Reflections in blocks of columns, $Q = Q_1\cdots Q_K$ with $Q_k = I - U_k T_k U_k^H$.

Each block is a compact WY transform. Applying one block to the partial products of another keeps
norms, so rounding errors add up and do not grow. A single transform of all columns would sum terms
that cancel when vectors are nearly parallel.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ._linalg import (
    Axis,
    adjoint,
    balanced_product,
    gram,
    inner_products,
    over_rows,
    product,
    product_over_rows,
    real_dtype,
    s_from,
    squared_norms,
    triangular_inverse,
)

COLUMNS = 64
"""The columns of a block. Fewer columns are one block."""
MOST_BLOCKS = 32
"""The most blocks that are applied in turn. More are joined first, so that programs stay small."""


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


class Panels(NamedTuple):
    r"""Hold some transforms $I - W_k U_k^H$.

    Attributes:
        u: ``(count, *, N, size)``, the unit columns.
        w: ``(count, *, N, size)``, their partial products.
        square: ``(count, *, 1, size)``, the squared norms of the columns of u, near 1.
    """

    u: Array
    w: Array
    square: Array

    def __getitem__(self, some: slice) -> Panels:
        """Return some of the transforms."""
        return Panels(self.u[some], self.w[some], self.square[some])


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
    width = min(size, COLUMNS)
    count = -(-size // max(width, 1))
    padded = jnp.pad(u, [(0, 0)] * (u.ndim - 1) + [(0, width * count - size)])
    parts = jnp.moveaxis(padded.reshape(*u.shape[:-1], count, width), -2, 0)
    return Blocks(u, parts, triangular_inverse(s_from(gram(parts, axis))))


def apply(given: Blocks, x: Array, *, adjointly: bool = False, axis: Axis = None) -> Array:
    """Return Q x, or Q^H x, for the columns of ``x (*, N, K)``."""
    panels = Joining(adjointly, False, axis).joined(_panels(given, adjointly, axis), MOST_BLOCKS)
    pairs = [pair for some in panels for pair in zip(some.u, some.w, strict=True)]
    if not adjointly:
        pairs.reverse()
    for u, w in pairs:
        c = over_rows(product(adjoint(u), x), axis)
        x = x - product(w, c)
    return x


def partial_products(
    given: Blocks, *, adjointly: bool = False, careful: bool = False, axis: Axis = None
) -> Array:
    r"""Return $W = UT$, or $Y = UT^H$ if adjointly, ``(*, N, L)``.

    Column j of W is twice $u_j$ after the reflections before it, and column j of Y after those
    behind it. Neighbors are joined, all pairs at once, until one panel is left.

    Args:
        given: the blocks.
        adjointly: return Y.
        careful: take twice the time for fewer rounding errors.
        axis: the mesh axis over which rows are divided.
    """
    if given.u.shape[-1] == 0:
        return given.u
    joining = Joining(adjointly, careful, axis)
    (panel,) = joining.joined(_panels(given, adjointly, axis), 1)
    w = panel.w
    if given.parts.shape[0] > 1:
        w = _rescaled(w, panel.square, axis)
    return w[0][..., : given.u.shape[-1]]


def _panels(given: Blocks, adjointly: bool, axis: Axis) -> Panels:
    """Return each block as a panel of its own."""
    factors = given.factors
    if adjointly:
        factors = adjoint(factors)
    square = squared_norms(given.parts, axis)
    w = _rescaled(balanced_product(given.parts, factors), square, axis)
    return Panels(given.parts, w, square)


def _rescaled(w: Array, square: Array, axis: Axis) -> Array:
    r"""Return columns of norm $2/\lVert u_j\rVert$, which they have but for rounding.

    This removes most of the error for nearly parallel vectors. There it is along the columns. Zero
    columns stay.
    """
    found = square * squared_norms(w / 2, axis)
    live = found > 0
    return jnp.where(live, w / jnp.sqrt(jnp.where(live, found, 1)), w)


class Joining(NamedTuple):
    """Describe how panels are joined, with the options of :func:`partial_products`."""

    adjointly: bool
    careful: bool
    axis: Axis

    def joined(self, panels: Panels, most: int) -> list[Panels]:
        """Join neighbors until at most so many are left, each of a width, in their order.

        A panel without a neighbor waits at the end, so the last one may have fewer columns.
        """
        rest: Panels | None = None
        count = panels.u.shape[0]
        while count > most:
            if count % 2 == 1:
                last = panels[-1:]
                panels = panels[:-1]
                if rest is not None:
                    last = self.join(last, rest)
                rest = last
            panels = self.join(panels[0::2], panels[1::2])
            count = count // 2
        if rest is None:
            return [panels]
        if most == 1:
            return [self.join(panels, rest)]
        return [panels, rest]

    def join(self, left: Panels, right: Panels) -> Panels:
        """Return panels of the columns of two. One is applied to the columns of the other."""
        if self.adjointly:
            left = self._applied(right, left)
        else:
            right = self._applied(left, right)
        return Panels(*(jnp.concatenate(both, -1) for both in zip(left, right, strict=True)))

    def _applied(self, transform: Panels, panels: Panels) -> Panels:
        if self.careful:
            c = 2 * inner_products(transform.u, panels.w / 2, self.axis)
        else:
            c = product_over_rows(transform.u, panels.w, self.axis)
        return Panels(panels.u, panels.w - balanced_product(transform.w, c), panels.square)
