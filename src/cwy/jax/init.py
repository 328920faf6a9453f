"""Initial values by name: orthogonal matrices to start from, and random reflection vectors.

Each takes a key of ``jax.random``, except :func:`identity`. It also takes the shape N x M of the
matrix, the number of reflections, a batch and a dtype. :func:`cwy.jax.householder_vectors` finds
the vectors and signs of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ._checks import computed_in
from ._linalg import real_dtype

__all__ = ["haar", "helfrich", "henaff", "identity", "matched_length", "random"]


def henaff(
    key: Array,
    n: int,
    m: int | None = None,
    *,
    reflections: int | None = None,
    batch: Sequence[int] = (),
    dtype: Any = jnp.float32,
) -> Array:
    r"""Return exp of a block-diagonal skew matrix (Henaff et al. 2016).

    It turns planes by angles uniform in $[-\pi, \pi]$. With L reflections, $\lfloor L/2\rfloor$
    planes turn.

    Example:
        >>> import jax
        >>> from cwy.jax import init
        >>> init.henaff(jax.random.key(0), 5).shape
        (5, 5)
    """
    _check_square("henaff", n, m)
    angles = _angles(key, n, reflections, -math.pi, math.pi, batch, dtype)
    return _rotations(n, angles).astype(dtype)


def helfrich(
    key: Array,
    n: int,
    m: int | None = None,
    *,
    reflections: int | None = None,
    batch: Sequence[int] = (),
    dtype: Any = jnp.float32,
    exp: bool = False,
) -> Array:
    r"""Return the Cayley transform of a block-diagonal skew matrix (Helfrich et al. 2018).

    It turns planes by angles t uniform in $[0, \pi/2]$. With L reflections, $\lfloor L/2\rfloor$
    planes turn. With ``exp`` it is exp of the same matrix: the angles are $\tan(t/2)$.

    Example:
        >>> import jax
        >>> from cwy.jax import init
        >>> bool((init.helfrich(jax.random.key(0), 4).diagonal() >= 0).all())
        True
    """
    _check_square("helfrich", n, m)
    angles = _angles(key, n, reflections, 0.0, math.pi / 2, batch, dtype)
    if exp:
        angles = jnp.tan(angles / 2)
    return _rotations(n, angles).astype(dtype)


def haar(
    key: Array,
    n: int,
    m: int | None = None,
    *,
    reflections: int | None = None,
    batch: Sequence[int] = (),
    dtype: Any = jnp.float32,
) -> Array:
    """Draw uniformly from all N x M matrices with orthonormal columns. Needs every reflection.

    Example:
        >>> import jax
        >>> from cwy.jax import init
        >>> init.haar(jax.random.key(0), 5, 3).shape
        (5, 3)
    """
    m = _columns("haar", n, m)
    if reflections is not None and reflections < m:
        raise ValueError(
            f"haar: {reflections} reflections do not reach a Haar-random {n} x {m} matrix. "
            "Leave reflections out, or use cwy.jax.init.random."
        )
    normal = jax.random.normal(key, (*batch, n, m), computed_in(dtype))
    q, r = jnp.linalg.qr(normal)
    d = jnp.diagonal(r, axis1=-2, axis2=-1)
    return (q * (d / jnp.abs(d))[..., None, :]).astype(dtype)


def identity(
    n: int,
    m: int | None = None,
    *,
    reflections: int | None = None,
    batch: Sequence[int] = (),
    dtype: Any = jnp.float32,
) -> Array:
    """Return exactly the identity, its first M columns.

    Example:
        >>> from cwy.jax import init
        >>> init.identity(2).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    m = _columns("identity", n, m)
    return jnp.broadcast_to(jnp.eye(n, m, dtype=dtype), (*batch, n, m))


def random(
    key: Array,
    n: int,
    m: int | None = None,
    *,
    reflections: int | None = None,
    batch: Sequence[int] = (),
    dtype: Any = jnp.float32,
    length: float | None = None,
) -> Array:
    """Draw reflection vectors ``(*, N, L)`` with uniform directions.

    Args:
        key: of ``jax.random``.
        n, m: the matrix is N x M.
        reflections: L, by default M.
        batch, dtype: of the vectors.
        length: their norm, by default :func:`matched_length`.

    Returns:
        Vectors for :func:`cwy.jax.cwy_matrix` or :func:`cwy.jax.tcwy_matrix`.

    Example:
        >>> import jax
        >>> from cwy.jax import init
        >>> init.random(jax.random.key(0), 6, reflections=4).shape
        (6, 4)
    """
    m = _columns("random", n, m)
    count = m
    if reflections is not None:
        count = reflections
    if not 1 <= count <= m or (count < m and m < n):
        allowed = f"between 1 and {m}"
        if m < n:
            allowed = f"{m}, the number of columns"
        raise ValueError(f"random: reflections must be {allowed}, got {count}.")
    if length is None:
        length = matched_length(n, m, count)
    v = jax.random.normal(key, (*batch, n, count), computed_in(dtype))
    return (v * (length / jnp.linalg.norm(v, axis=-2, keepdims=True))).astype(dtype)


def matched_length(n: int, m: int, reflections: int, overlap: float | None = None) -> float:
    r"""Return the norm of the vectors at which Adam moves Q as far as it would move a free weight.

    $$ \rho^2 = 8\,\tfrac LN\,(1 + \tfrac4\pi\tfrac LN) \quad (M = N), \qquad
       \rho = 2\,(a + \tfrac MN)/\sqrt a \quad (M < N). $$

    The page on the mathematics derives it. The result has five significant bits.

    Args:
        n, m: the matrix is N x M.
        reflections: L.
        overlap: a, the mean square norm of the first M entries of a unit vector. Random vectors
            have M/N, the default.

    Example:
        >>> from cwy.jax import init
        >>> init.matched_length(64, 64, 64)
        4.25
    """
    ratio = reflections / n
    if n == m:
        length = math.sqrt(8 * ratio * (1 + 4 / math.pi * ratio))
    else:
        if overlap is None:
            overlap = ratio
        length = 2 * (overlap + ratio) / math.sqrt(overlap)
    mantissa, exponent = math.frexp(length)
    return math.ldexp(round(mantissa * 32) / 32, exponent)


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
            "Use cwy.jax.init.haar or identity."
        )


def _angles(
    key: Array,
    n: int,
    reflections: int | None,
    low: float,
    high: float,
    batch: Sequence[int],
    dtype: Any,
) -> Array:
    """Draw angles uniform in [low, high], one for each plane that the reflections can turn."""
    if reflections is None:
        reflections = n
    planes = min(reflections, n) // 2
    real = real_dtype(computed_in(dtype))
    return jax.random.uniform(key, (*batch, planes), real, low, high)


def _rotations(n: int, angles: Array) -> Array:
    """Return block-diagonal rotations [[cos, sin], [-sin, cos]] by these angles ``(*, planes)``."""
    *batch, planes = angles.shape
    q = identity(n, batch=batch, dtype=angles.dtype)
    even = 2 * jnp.arange(planes)
    odd = even + 1
    q = q.at[..., even, even].set(jnp.cos(angles))
    q = q.at[..., odd, odd].set(jnp.cos(angles))
    q = q.at[..., even, odd].set(jnp.sin(angles))
    return q.at[..., odd, even].set(-jnp.sin(angles))
