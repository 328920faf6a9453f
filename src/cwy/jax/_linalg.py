"""Small linear algebra: products at highest precision, and triangles.

Rows of a matrix may be divided among devices. A sum over them then ends with a sum over the mesh
axis that :func:`jax.shard_map` names.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

HIGHEST = lax.Precision.HIGHEST
"""The precision of every product, so that neither TF32 nor bfloat16 passes cost orthogonality."""

Axis = str | tuple[str, ...] | None
"""The mesh axis over which rows are divided, or None."""

Way = Literal["products", "solve"]
"""How a triangular matrix is inverted."""

INVERSE: Way = "products"
"""The way that the library uses. ``python -m tests.jax.choices`` times both."""

_PANELS = 4
"""Panels into which a product with a triangular matrix is cut. They leave out 6 of 16 blocks."""

_CUT = 2048
"""The size from which such a product is cut. Panels of a smaller one would not fill a GPU."""

_ROWS = 512
"""The most rows over which a kernel sums at once, where the sum must keep its digits."""

_DIRECT = 8
"""The rows of a triangular matrix that are inverted by substitution, without products."""


def product(a: Array, b: Array) -> Array:
    """Return ``a @ b`` at highest precision."""
    return jnp.matmul(a, b, precision=HIGHEST)


def balanced_product(a: Array, b: Array) -> Array:
    """Return ``a @ b`` with small partial sums if neighbors in a, or in b, nearly cancel.

    They do when reflection vectors are nearly parallel: partial products of reflections alternate
    in sign. Kernels that add terms in another order than theirs would then sum large numbers, and
    lose digits. So sums and differences of neighbors are multiplied instead.
    """
    if a.shape[-1] % 2 == 1:
        a = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, 1)])
        b = jnp.pad(b, [(0, 0)] * (b.ndim - 2) + [(0, 1), (0, 0)])
    even_columns = a[..., 0::2]
    odd_columns = a[..., 1::2]
    even_rows = b[..., 0::2, :] / 2
    odd_rows = b[..., 1::2, :] / 2
    left = jnp.concatenate([even_columns + odd_columns, even_columns - odd_columns], -1)
    right = jnp.concatenate([even_rows + odd_rows, even_rows - odd_rows], -2)
    # Without the barrier, XLA would try kernels for a product with these sums inside.
    left, right = lax.optimization_barrier((left, right))
    return product(left, right)


def product_over_rows(a: Array, b: Array, axis: Axis = None) -> Array:
    """Return ``a^H b`` for ``a, b (*, N, L)``, summed over a few hundred rows at a time.

    A kernel may add thousands of rows one after another. The rounding errors grow with their
    number. For vectors from a space of few dimensions they are alike, and cost orthogonality.
    """
    rows = a.shape[-2]
    groups = -(-rows // _ROWS)
    if groups > 1:
        a = _in_groups(a, groups)
        b = _in_groups(b, groups)
        # Without the barrier, XLA would make one product of all rows again.
        each = lax.optimization_barrier(product(adjoint(a), b))
        return over_rows(jnp.sum(each, -3), axis)
    return over_rows(product(adjoint(a), b), axis)


def _in_groups(x: Array, groups: int) -> Array:
    """Return ``(*, groups, rows, L)``, with zero rows at the end where rows do not suffice."""
    *batch, rows, columns = x.shape
    each = -(-rows // groups)
    below = [(0, 0)] * len(batch) + [(0, groups * each - rows), (0, 0)]
    return jnp.pad(x, below).reshape(*batch, groups, each, columns)


def adjoint(a: Array) -> Array:
    """Return the conjugate transpose of a matrix or of a batch of them."""
    return a.mT.conj()


def over_rows(partial_sum: Array, axis: Axis) -> Array:
    """Return a sum over all rows from the sum over this device's rows."""
    if axis is None:
        return partial_sum
    return lax.psum(partial_sum, axis)


def real_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of real parts."""
    return jnp.finfo(dtype).dtype


def _panel_edges(size: int) -> list[int]:
    """Return the columns at which panels begin, and the end."""
    if size < _CUT:
        return [0, size]
    return [size * panel // _PANELS for panel in range(_PANELS + 1)]


def strict_upper_product(a: Array, b: Array, axis: Axis = None) -> Array:
    """Return the strict upper triangle of ``a^H b`` for ``a, b (*, N, L)``."""
    size = b.shape[-1]
    edges = _panel_edges(size)
    panels = []
    for begin, end in pairwise(edges):
        panel = product(adjoint(a[..., :end]), b[..., begin:end])
        below = [(0, 0)] * (panel.ndim - 2) + [(0, size - end), (0, 0)]
        panels.append(jnp.pad(panel, below))
    return over_rows(jnp.triu(jnp.concatenate(panels, -1), 1), axis)


def times_upper(a: Array, t: Array) -> Array:
    """Return ``a @ t`` for an upper-triangular t."""
    edges = _panel_edges(t.shape[-1])
    panels = [product(a[..., :end], t[..., :end, begin:end]) for begin, end in pairwise(edges)]
    return jnp.concatenate(panels, -1)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def gram(u: Array, axis: Axis = None) -> Array:
    r"""Compute $U^H U$ for columns of norm at most 1, with few rounding errors.

    In single precision U is the sum of a high and a low part. Entries of the high part are
    multiples of $2^{-11}$, so its products are multiples of $2^{-22}$. Columns have norm at most 1,
    so no partial sum exceeds 1: it is exact in any order. The other terms are small.
    """
    if real_dtype(u.dtype) != jnp.float32:
        return over_rows(product(adjoint(u), u), axis)
    high = _rounded(u, 2.0**11)
    low = u - high
    exact = over_rows(product(adjoint(high), high), axis)
    cross = over_rows(product(adjoint(high + low / 2), low), axis)
    return exact + (cross + adjoint(cross))


@gram.defjvp
def _gram_jvp(axis, primals, tangents):
    (u,) = primals
    (du,) = tangents
    half = over_rows(product(adjoint(u), du), axis)
    return gram(u, axis), half + adjoint(half)


def inner_products(a: Array, b: Array, axis: Axis = None) -> Array:
    r"""Compute $A^H B$ for columns of norm at most about 1, as :func:`gram` does, by 3 products."""
    if real_dtype(a.dtype) != jnp.float32:
        return over_rows(product(adjoint(a), b), axis)
    high_a = _rounded(a, 2.0**11)
    high_b = _rounded(b, 2.0**11)
    exact = over_rows(product(adjoint(high_a), high_b), axis)
    cross = product(adjoint(a - high_a), high_b) + product(adjoint(a), b - high_b)
    return exact + over_rows(cross, axis)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def squared_norms(x: Array, axis: Axis = None) -> Array:
    """Return the squared norms ``(*, 1, L)`` of columns of norm about 1, as :func:`gram` does."""
    if real_dtype(x.dtype) != jnp.float32:
        return over_rows(jnp.sum((x * x.conj()).real, -2, keepdims=True), axis)
    high = _rounded(x, 2.0**11)
    low = x - high
    exact = (high * high.conj()).real
    rest = ((high + high + low) * low.conj()).real
    exact, rest = _sums_over_rows(exact, rest)
    return over_rows(exact, axis) + over_rows(rest, axis)


@squared_norms.defjvp
def _squared_norms_jvp(axis, primals, tangents):
    (x,) = primals
    (dx,) = tangents
    half = jnp.sum((x.conj() * dx).real, -2, keepdims=True)
    return squared_norms(x, axis), 2 * over_rows(half, axis)


def _sums_over_rows(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the sums of two arrays over their rows, as one reduction.

    On a CPU two of them take up to ten times as long.
    """
    zero = jnp.zeros((), a.dtype)

    def add(left, right):
        return left[0] + right[0], left[1] + right[1]

    sums = lax.reduce((a, b), (zero, zero), add, (a.ndim - 2,))
    return jnp.expand_dims(sums[0], -2), jnp.expand_dims(sums[1], -2)


def _rounded(x: Array, scale: float) -> Array:
    """Return x rounded to multiples of 1/scale."""
    if jnp.iscomplexobj(x):
        return lax.complex(_rounded(x.real, scale), _rounded(x.imag, scale))
    return jnp.round(x * scale) / scale


def s_from(gram_matrix: Array) -> Array:
    r"""Return S from $U^H U$, with ½ for a zero column.

    The diagonal is that of the U actually used, not a literal ½. This keeps Q orthogonal for any
    rounding of U.
    """
    square = jnp.diagonal(gram_matrix, axis1=-2, axis2=-1)
    half = jnp.where(square == 0, 1, square) / 2
    return jnp.triu(gram_matrix, 1) + _diagonal_matrix(half)


def _diagonal_matrix(entries: Array) -> Array:
    eye = jnp.eye(entries.shape[-1], dtype=entries.dtype)
    return entries[..., None] * eye


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def triangular_inverse(s: Array, way: Way = INVERSE) -> Array:
    r"""Return the inverse of upper-triangular matrices ``(*, L, L)``.

    Args:
        s: the matrices.
        way: "products" merges pairs of diagonal blocks, $T_{12} = -T_{11} S_{12} T_{22}$, all pairs
            of a size at once. "solve" is one triangular solve.
    """
    if way == "solve":
        eye = jnp.broadcast_to(jnp.eye(s.shape[-1], dtype=s.dtype), s.shape)
        return lax.linalg.triangular_solve(s, eye, left_side=True, lower=False)
    return _inverse_by_products(s)


@triangular_inverse.defjvp
def _triangular_inverse_jvp(way, primals, tangents):
    (s,) = primals
    (ds,) = tangents
    t = triangular_inverse(s, way)
    return t, -product(t, product(jnp.triu(ds), t))


def _inverse_by_products(s: Array) -> Array:
    """Invert diagonal blocks of some rows, then merge inverses of 2, 4, ... of them until one."""
    size = s.shape[-1]
    if size == 0:
        return s
    if size <= _DIRECT:
        return _inverse_by_substitution(s)
    whole = -(-size // _DIRECT) * _DIRECT
    count = whole // _DIRECT
    # The rows that are added have a diagonal of 1, and are cut off again.
    padded = jnp.pad(s, [(0, 0)] * (s.ndim - 2) + [(0, whole - size)] * 2)
    diagonal = jnp.arange(whole) >= size
    s = padded + jnp.diag(diagonal.astype(s.dtype))
    # One dimension at a time, as an array that is divided among devices needs it.
    columns = s.reshape(*s.shape[:-1], count, _DIRECT)
    blocks = columns.reshape(*s.shape[:-2], count, _DIRECT, count, _DIRECT)
    same = jnp.eye(count, dtype=bool)[:, None, :, None]
    inverses = _inverse_by_substitution(jnp.sum(jnp.where(same, blocks, 0), -2))
    diagonal_blocks = jnp.where(same, inverses[..., :, :, None, :], 0)
    t = diagonal_blocks.reshape(columns.shape).reshape(s.shape)
    index = jnp.arange(whole)
    block = _DIRECT
    while block < whole:
        number = index // block
        # The corners right of diagonal blocks with even numbers.
        corner = (number[:, None] % 2 == 0) & (number[:, None] + 1 == number)
        # Behind the barrier all these products are alike, and XLA tries kernels for one of them.
        corners = lax.optimization_barrier(jnp.where(corner, s, 0))
        inner = lax.optimization_barrier(product(corners, t))
        t = lax.optimization_barrier(t - product(t, inner))
        block *= 2
    return t[..., :size, :size]


def _inverse_by_substitution(s: Array) -> Array:
    """Invert small upper-triangular matrices, row by row from the last."""
    size = s.shape[-1]
    eye = jnp.eye(size, dtype=s.dtype)
    rows: list[Array] = []
    for i in reversed(range(size)):
        row = jnp.broadcast_to(eye[i], s[..., i, :].shape)
        for k, below in enumerate(rows, i + 1):
            row = row - s[..., i, k, None] * below
        rows.insert(0, row / s[..., i, i, None])
    return jnp.stack(rows, -2)
