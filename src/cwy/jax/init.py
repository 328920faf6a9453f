"""Initial values by name: orthogonal matrices to start from, and random reflection vectors.

Each takes a key of ``jax.random``, except :func:`identity`. It also takes the shape N x M of the
matrix, the number of reflections, a batch and a dtype. A matrix may use that many reflections, and
never uses more than M. :func:`cwy.jax.householder_vectors` finds the vectors and signs of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ._checks import (
    check_dtype,
    check_key,
    checked_batch,
    checked_flag,
    checked_whole,
    computed_in,
    is_traced,
)
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
    wanted = _checked("henaff", n, m, reflections, batch, dtype)
    _check_square(wanted)
    angles = _angles(key, wanted, -math.pi, math.pi)
    return _rotations(wanted.n, angles).astype(dtype)


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
    wanted = _checked("helfrich", n, m, reflections, batch, dtype)
    _check_square(wanted)
    by_exp = checked_flag("helfrich", "exp", exp)
    angles = _angles(key, wanted, 0.0, math.pi / 2)
    if by_exp:
        angles = jnp.tan(angles / 2)
    return _rotations(wanted.n, angles).astype(dtype)


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
    wanted = _checked("haar", n, m, reflections, batch, dtype)
    _check_not_wide(wanted)
    if wanted.reflections < wanted.m:
        raise ValueError(
            f"haar: {reflections} reflections do not reach a Haar-random {wanted.n} x {wanted.m} "
            "matrix. Leave reflections out, or use cwy.jax.init.random."
        )
    check_key("haar", key)
    shape = (*wanted.batch, wanted.n, wanted.m)
    normal = jax.random.normal(key, shape, computed_in(dtype))
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
    wanted = _checked("identity", n, m, reflections, batch, dtype)
    _check_not_wide(wanted)
    eye = jnp.eye(wanted.n, wanted.m, dtype=dtype)
    return jnp.broadcast_to(eye, (*wanted.batch, *eye.shape))


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
    wanted = _checked("random", n, m, reflections, batch, dtype, fewest=1)
    _check_not_wide(wanted)
    _check_vectors(wanted)
    if length is None:
        length = matched_length(wanted.n, wanted.m, wanted.reflections)
    _check_length(length)
    check_key("random", key)
    shape = (*wanted.batch, wanted.n, wanted.reflections)
    v = jax.random.normal(key, shape, computed_in(dtype))
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


@dataclass(frozen=True)
class _Wanted:
    """Describe an initial value that a function was asked for, after checks.

    Attributes:
        call: the function.
        n, m: the matrix is N x M.
        reflections: how many it may use, M unless given.
        batch, dtype: of the result.
    """

    call: str
    n: int
    m: int
    reflections: int
    batch: tuple[int, ...]
    dtype: Any


def _checked(
    call: str, n: Any, m: Any, reflections: Any, batch: Any, dtype: Any, *, fewest: int = 0
) -> _Wanted:
    """Return what was asked for, or raise unless each part of it can be meant."""
    n = checked_whole(call, "n", n)
    if m is None:
        m = n
    m = checked_whole(call, "m", m)
    count = m
    if reflections is not None:
        count = checked_whole(call, "reflections", reflections, fewest)
    batch = checked_batch(call, batch)
    check_dtype(call, dtype)
    return _Wanted(call, n, m, count, batch, dtype)


def _check_not_wide(wanted: _Wanted) -> None:
    if wanted.m > wanted.n:
        raise ValueError(
            f"{wanted.call}: expected M <= N, got {wanted.n} x {wanted.m}. "
            "For a wide matrix, transpose the result."
        )


def _check_square(wanted: _Wanted) -> None:
    if wanted.n != wanted.m:
        raise ValueError(
            f"{wanted.call}: turning planes makes a square matrix, got {wanted.n} x {wanted.m}. "
            "Use cwy.jax.init.haar or identity."
        )


def _check_vectors(wanted: _Wanted) -> None:
    """Raise unless so many vectors make a matrix of this shape."""
    n = wanted.n
    m = wanted.m
    count = wanted.reflections
    if m == 0:
        raise ValueError(f"random: the matrix must have at least one column, got {n} x {m}.")
    if count > m or (count < m and m < n):
        allowed = f"between 1 and {m}"
        if m < n:
            allowed = f"{m}, the number of columns"
        raise ValueError(f"random: reflections must be {allowed}, got {count}.")


def _check_length(length: Any) -> None:
    """Raise unless vectors can have this norm. A traced one cannot be checked."""
    if is_traced(length):
        return
    try:
        right = length > 0
    except TypeError:
        right = False
    if not np.all(right):
        raise ValueError(f"random: length must be a positive number, got {length!r}.")


def _angles(key: Array, wanted: _Wanted, low: float, high: float) -> Array:
    """Draw angles uniform in [low, high], one for each plane that the reflections can turn."""
    check_key(wanted.call, key)
    planes = min(wanted.reflections, wanted.n) // 2
    real = real_dtype(computed_in(wanted.dtype))
    return jax.random.uniform(key, (*wanted.batch, planes), real, low, high)


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
