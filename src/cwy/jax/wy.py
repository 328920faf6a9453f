"""Products of Householder reflections by the compact WY transform."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ._blocks import Blocks, apply, blocks, normalize, partial_products
from ._checks import (
    as_array,
    checked_axis,
    checked_flag,
    checked_signs,
    computed_in,
    vectors_of,
)
from ._linalg import (
    Axis,
    adjoint,
    balanced_product,
    gram,
    over_rows,
    product,
    s_from,
    strict_upper_product,
    times_upper,
)


class WY(NamedTuple):
    r"""Hold the factors of $Q = I - U T U^H$.

    ``u (*, N, L)`` has unit columns, and ``t (*, L, L)`` $= S^{-1}$ is upper-triangular.
    """

    u: Array
    t: Array


def wy_factors(v: Any, *, axis_name: Axis = None) -> WY:
    r"""Compute the factors of a product of Householder reflections.

    With $u_i = v_i/\lVert v_i\rVert$,
    $$ H(v_1)\cdots H(v_L) = I - U T U^H, \quad T = S^{-1}, \quad
       S = \tfrac12 I + \mathrm{striu}(U^H U). $$

    Args:
        v: ``(*, N, L)``, the reflection vectors as columns. A zero column stands for no reflection.
        axis_name: the mesh axis over which the rows of v are divided, inside ``jax.shard_map``.
            Sums of L x L and smaller arrays travel.

    Returns:
        ``WY(u, t)``: ``u (*, N, L)`` with unit columns, divided as v is, and ``t (*, L, L)``
        upper-triangular, no entry above 4, up to rounding. For half-precision ``v`` they are
        float32.

    Example:
        >>> import jax
        >>> from cwy.jax import wy_factors
        >>> u, t = wy_factors(jax.random.normal(jax.random.key(0), (6, 4)))
        >>> u.shape, t.shape
        ((6, 4), (4, 4))
    """
    v = vectors_of("wy_factors", v)
    axis = checked_axis("wy_factors", axis_name)
    return WY(*_jitted_factors(v.astype(computed_in(v.dtype)), axis))


def checked_factors(call: str, factors: WY, rows: int | None = None) -> WY:
    """Return factors as arrays, or raise unless their shapes fit together.

    Args:
        call: the function that was called.
        factors: what came.
        rows: the N that a single pair of factors must have. By default any N and any batch will do.
    """
    u = as_array(call, "the factor u", factors.u)
    t = as_array(call, "the factor t", factors.t)
    size = u.shape[-1:]
    right = u.ndim >= 2 and t.shape == u.shape[:-2] + size + size
    allowed = "u (*, N, L) and t (*, L, L)"
    if rows is not None:
        right = right and u.shape[:-1] == (rows,)
        allowed = f"u ({rows}, L) and t (L, L) for states of {rows}"
    if not right:
        raise ValueError(
            f"{call}: the factors must be {allowed}, got {u.shape} and {t.shape}. "
            "Pass both as wy_factors returns them."
        )
    return WY(u, t)


def cwy_matrix(v: Any, *, signs: Any = None) -> Array:
    r"""Compute a product of Householder reflections (compact WY).

    With $u_i = v_i/\lVert v_i\rVert$,
    $$ Q = H(v_1)\cdots H(v_L) = I - U S^{-1} U^H, \quad S = \tfrac12 I + \mathrm{striu}(U^H U). $$

    Args:
        v: ``(*, N, L)``, the reflection vectors as columns. A zero column stands for no reflection.
        signs: ``(*, N)``, ±1 (complex: of modulus 1), with which the columns of Q are multiplied.

    Returns:
        ``(*, N, N)``, orthogonal (unitary, for complex ``v``). Its determinant is $(-1)^L$ times
        that of the signs.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from cwy.jax import cwy_matrix
        >>> q = cwy_matrix(jax.random.normal(jax.random.key(0), (6, 4)))
        >>> bool(jnp.abs(q.T @ q - jnp.eye(6)).max() < 1e-5)
        True

    References:
        Likhosherstov et al., CWY parametrization, 2021, Theorem 2.
    """
    v = vectors_of("cwy_matrix", v)
    signs = checked_signs("cwy_matrix", signs, v.shape[:-1])
    return _signed(_jitted_first_columns(_widened(v), v.shape[-2]), v, signs)


def tcwy_matrix(v: Any, *, signs: Any = None) -> Array:
    r"""Compute the first M columns of a product of M reflections (truncated compact WY).

    No N x N matrix is formed, forward or backward.
    $$ \Omega = \begin{bmatrix} I \\ 0 \end{bmatrix} - U S^{-1} U_1^H, \quad
       U_1 = \text{the first } M \text{ rows of } U. $$

    Args:
        v: ``(*, N, M)`` with $M \le N$, the reflection vectors as columns.
        signs: ``(*, M)``, as in :func:`cwy_matrix`.

    Returns:
        ``(*, N, M)``, with orthonormal columns: a point of St(N, M).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from cwy.jax import tcwy_matrix
        >>> omega = tcwy_matrix(jax.random.normal(jax.random.key(0), (1000, 3)))
        >>> omega.shape, bool(jnp.abs(omega.T @ omega - jnp.eye(3)).max() < 1e-5)
        ((1000, 3), True)

    References:
        Likhosherstov et al., CWY parametrization, 2021, Theorem 3.
    """
    v = vectors_of("tcwy_matrix", v)
    n, m = v.shape[-2:]
    if m > n:
        raise ValueError(
            f"tcwy_matrix: v must be (*, N, M) with M <= N, got N = {n}, M = {m}. "
            "Transpose it, or drop columns."
        )
    signs = checked_signs("tcwy_matrix", signs, (*v.shape[:-2], m))
    return _signed(_jitted_first_columns(_widened(v), m), v, signs)


def cwy_multiply(v: Any, x: Any, adjoint: bool = False, *, axis_name: Axis = None) -> Array:
    r"""Compute $Qx$ or $Q^H x$ for each vector of ``x``, without forming $Q = H(v_1)\cdots H(v_L)$.

    Args:
        v: ``(*, N, L)`` reflection vectors, or their factors (:func:`wy_factors`) when several
            calls share them.
        x: ``(*, ..., N)``. Its leading dimensions begin with the batch of ``v``.
        adjoint: multiply by $Q^H$, the inverse of $Q$.
        axis_name: the mesh axis over which N is divided, in v and in x, inside ``jax.shard_map``.
            With factors, only a sum of L numbers per vector of x travels.

    Returns:
        The shape of ``x``, in the wider dtype of the two. Every vector keeps its norm.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from cwy.jax import cwy_multiply
        >>> v = jax.random.normal(jax.random.key(0), (64, 8))
        >>> x = jax.random.normal(jax.random.key(1), (5, 64))
        >>> y = cwy_multiply(v, x)
        >>> bool(jnp.allclose(cwy_multiply(v, y, adjoint=True), x, atol=1e-5))
        True
    """
    factors = None
    if isinstance(v, WY):
        factors = checked_factors("cwy_multiply", v)
        v = factors.u
    v = vectors_of("cwy_multiply", v)
    x = as_array("cwy_multiply", "x", x)
    batch = _checked_batch(v, x)
    adjointly = checked_flag("cwy_multiply", "adjoint", adjoint)
    axis = checked_axis("cwy_multiply", axis_name)
    result_dtype = jnp.promote_types(v.dtype, x.dtype)
    dtype = computed_in(result_dtype)
    rows = x.astype(dtype).reshape(*batch, math.prod(x.shape[len(batch) : -1]), x.shape[-1])
    if factors is None:
        y = _jitted_multiply(v.astype(dtype), rows, adjointly, axis)
    else:
        u = v.astype(dtype)
        t = factors.t.astype(dtype)
        y = _jitted_multiply_by_factors(u, t, rows, adjointly, axis)
    return y.reshape(x.shape).astype(result_dtype)


def _checked_batch(v: Array, x: Array) -> tuple[int, ...]:
    """Return the batch of v, or raise unless ``x`` can be multiplied by it."""
    batch = v.shape[:-2]
    n = v.shape[-2]
    if x.ndim == 0 or x.shape[-1] != n or x.shape[:-1][: len(batch)] != batch:
        raise ValueError(
            f"cwy_multiply: v is {v.shape}, so x must be {(*batch, '...', n)}, got {x.shape}. "
            "The last dimension of x holds the vectors."
        )
    return batch


def _widened(v: Array) -> Array:
    return v.astype(computed_in(v.dtype))


def _signed(q: Array, v: Array, signs: Array | None) -> Array:
    """Return a matrix with signs, in the dtype of v, or the wider one of v and signs."""
    if signs is None:
        return q.astype(v.dtype)
    signed = q * signs[..., None, :]
    return signed.astype(jnp.promote_types(v.dtype, signs.dtype))


def _unit_columns(v: Array, axis: Axis) -> Array:
    return normalize(v, axis).u


def _derivative_of_s(u: Array, du: Array, axis: Axis) -> Array:
    """Return dS. Its diagonal is zero, because columns keep their norm."""
    half = over_rows(product(adjoint(u), du), axis)
    return jnp.triu(half + adjoint(half), 1)


def _t_from(given: Blocks, axis: Axis) -> Array:
    r"""Return T. For several blocks it is read from $W^H W = T + T^H$."""
    size = given.u.shape[-1]
    if given.factors.shape[0] == 1:
        return given.factors[0][..., :size, :size]
    # The columns of W have norm 2.
    w = partial_products(given, careful=True, axis=axis)
    return 4 * s_from(gram(w / 2, axis))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _factors(v: Array, axis: Axis) -> tuple[Array, Array]:
    u = _unit_columns(v, axis)
    return u, _t_from(blocks(u, axis), axis)


@_factors.defjvp
def _factors_jvp(axis, primals, tangents):
    (v,) = primals
    u, t = _factors(v, axis)
    _, du = jax.jvp(lambda v: _unit_columns(v, axis), primals, tangents)
    ds = _derivative_of_s(u, du, axis)
    return (u, t), (du, -product(t, product(ds, t)))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _first_columns(v: Array, m: int) -> Array:
    """Return the first m columns of Q."""
    u = _unit_columns(v, None)
    return _columns_from(u, partial_products(blocks(u)), m)


def _columns_from(u: Array, w: Array, m: int) -> Array:
    taken = product(w, adjoint(u[..., :m, :]))
    return jnp.eye(u.shape[-2], m, dtype=u.dtype) - taken


@_first_columns.defjvp
def _first_columns_jvp(m, primals, tangents):
    u, du = jax.jvp(lambda v: _unit_columns(v, None), primals, tangents)
    given = blocks(u)
    w = partial_products(given)
    q = _columns_from(u, w, m)
    n, size = u.shape[-2:]
    if m == n and 2 * size >= n:
        return q, _turn(u, du, w, q)
    y = partial_products(given, adjointly=True)[..., :m, :]
    ds = _derivative_of_s(u, du, None)
    inner = product(ds, adjoint(y)) - adjoint(du[..., :m, :])
    return q, product(w, inner) - product(du, adjoint(y))


def _turn(u: Array, du: Array, w: Array, q: Array) -> Array:
    r"""Return $\mathrm{d}Q = (PW^H - WP^H)\,Q$ for many reflections.

    With $M = U^H \mathrm{d}U$, $P = \mathrm{d}U - W(\mathrm{striu}(M) + \mathrm{diag}(M)/2)$.
    """
    upper = strict_upper_product(u, du)
    if jnp.iscomplexobj(u):  # the diagonal is imaginary
        along = jnp.sum(u.conj() * du, -2)
        upper = upper + along[..., None] * jnp.eye(u.shape[-1], dtype=u.dtype) / 2
    p = du - times_upper(w, upper)
    half = product(p, adjoint(w))
    return product(half - adjoint(half), q)


@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _multiply(v: Array, x: Array, adjointly: bool, axis: Axis) -> Array:
    """Map the rows of ``x (*, R, N)``."""
    given = blocks(_unit_columns(v, axis), axis)
    return apply(given, x.mT, adjointly=adjointly, axis=axis).mT


@_multiply.defjvp
def _multiply_jvp(adjointly, axis, primals, tangents):
    v, rows = primals
    dv, drows = tangents
    x = rows.mT
    u, du = jax.jvp(lambda v: _unit_columns(v, axis), (v,), (dv,))
    given = blocks(u, axis)
    y = apply(given, x, adjointly=adjointly, axis=axis)
    dy = apply(given, drows.mT, adjointly=adjointly, axis=axis)
    # W and Q^H W = -Y, or the other way round, give Y^H x without Y.
    w = partial_products(given, adjointly=adjointly, axis=axis)
    c = -over_rows(product(adjoint(w), y), axis)
    ds = _derivative_of_s(u, du, axis)
    if adjointly:
        ds = adjoint(ds)
    inner = product(ds, c) - over_rows(product(adjoint(du), x), axis)
    dy = dy + product(w, inner) - product(du, c)
    return y.mT, dy.mT


def _multiply_by_factors(u: Array, t: Array, rows: Array, adjointly: bool, axis: Axis) -> Array:
    x = rows.mT
    if adjointly:
        t = adjoint(t)
    c = over_rows(product(adjoint(u), x), axis)
    return (x - balanced_product(u, balanced_product(t, c))).mT


_jitted_factors = jax.jit(_factors, static_argnums=1)
_jitted_first_columns = jax.jit(_first_columns, static_argnums=1)
_jitted_multiply = jax.jit(_multiply, static_argnums=(2, 3))
_jitted_multiply_by_factors = jax.jit(_multiply_by_factors, static_argnums=(3, 4))
