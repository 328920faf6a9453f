"""From a matrix back to reflection vectors: the constructive proofs of Theorems 1 and 3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ._checks import as_array, as_whole, checked_signs, computed_in, is_traced, static_hint


class Found(NamedTuple):
    r"""Hold reflection vectors and signs with $Q = H(v_1)\cdots H(v_L)\,\mathrm{diag}(s)$.

    Attributes:
        v: ``(*, N, L)``, the vectors as columns.
        signs: ``(*, M)``.
    """

    v: Any
    signs: Any


def householder_vectors(
    q: Any, reflections: int | None = None, *, signs: Any = None
) -> tuple[Array, Array]:
    r"""Find reflection vectors of an orthogonal matrix, the inverse of :func:`cwy_matrix`.

    It finds $Q = H(v_1)\cdots H(v_L)\,\mathrm{diag}(s)$, also for :func:`tcwy_matrix`. As many
    reflections as columns reach every matrix. Fewer reach those $Q$ for which
    $Q\,\mathrm{diag}(s) - I$ has rank at most L. For complex $Q$, fewer find only a diagonal and a
    single reflection of it.

    It has no derivative. Values are checked and computed with in float64, on the host. Inside
    ``jit`` or ``vmap`` there are none: then nothing is checked, the computation runs in the dtype
    of ``q``, and there must be as many reflections as columns.

    Args:
        q: ``(*, N, M)`` with orthonormal columns, $N \ge M$.
        reflections: L, by default M. Only a square matrix may have fewer than M.
        signs: ``(*, M)`` or ``(M,)``, the signs to try first when L < N. By default these are +1,
            then the signs of q's diagonal.

    Returns:
        ``(v, signs)``: ``v (*, N, L)`` with unit columns, none of them zero, and ``signs (*, M)``,
        ±1 (for complex ``q``, complex numbers of modulus 1).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from cwy.jax import cwy_matrix, householder_vectors, init
        >>> q = init.haar(jax.random.key(0), 7)
        >>> v, signs = householder_vectors(q)
        >>> bool(jnp.allclose(cwy_matrix(v) * signs, q, atol=1e-5))
        True
    """
    q = as_array("householder_vectors", "the matrix", q)
    if q.ndim < 2:
        raise ValueError(f"householder_vectors: expected a matrix (*, N, M), got shape {q.shape}.")
    n, m = q.shape[-2:]
    if n < m:
        raise ValueError(
            f"householder_vectors: expected N >= M, got N = {n}, M = {m}. Pass the transpose."
        )
    count = _checked_count(reflections, n, m)
    _check_hint(signs, q)
    if is_traced(q):
        if count < m:
            raise ValueError(
                f"householder_vectors: {count} reflections of a matrix with {m} columns are found "
                "from its values, which jit and vmap do not have. Call it outside of them, or "
                "leave reflections out."
            )
        return _traced(q)
    if count < m and is_traced(signs):
        raise ValueError(
            f"householder_vectors: {count} reflections of a matrix with {m} columns are found "
            f"from the values of signs, got {signs}, which is traced. Call it outside of jit and "
            "vmap, or leave signs out."
        )
    found = _on_host(q, count, signs)
    v = found.v / np.linalg.norm(found.v, axis=-2, keepdims=True)
    return jnp.asarray(v, q.dtype), jnp.asarray(found.signs, q.dtype)


def _checked_count(reflections: Any, n: int, m: int) -> int:
    """Return L, or raise unless so many reflections can make an ``n`` x ``m`` matrix."""
    if m == 0:
        raise ValueError(
            f"householder_vectors: the matrix must have at least one column, got {n} x {m}."
        )
    if reflections is None:
        return m
    count = as_whole(reflections)
    if n == m:
        right = count is not None and 1 <= count <= m
        allowed = f"a whole number between 1 and {m}"
    else:
        right = count == m
        allowed = f"{m}, the number of columns"
    if count is None or not right:
        raise ValueError(
            f"householder_vectors: reflections must be {allowed}, got {reflections!r}."
            f"{static_hint(reflections)}"
        )
    return count


def _check_hint(signs: Any, q: Array) -> None:
    """Raise unless signs to try first can be those of ``q``."""
    shape = (*q.shape[:-2], q.shape[-1])
    if getattr(signs, "ndim", None) == 1:
        shape = shape[-1:]
    checked_signs("householder_vectors", signs, shape, on_host=True)
    if signs is not None and jnp.iscomplexobj(signs) and not jnp.iscomplexobj(q):
        raise TypeError(
            f"householder_vectors: signs must be real for a matrix of {q.dtype}, "
            f"got {signs.dtype}. Pass signs.real."
        )


@jax.custom_jvp
def _traced(q: Array) -> tuple[Array, Array]:
    """Find vectors column by column, without reading values."""
    work = q.astype(computed_in(q.dtype))
    n, m = work.shape[-2:]
    rows = jnp.arange(n)

    def step(j: int, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        rest, v, d = state
        column = jnp.where(rows >= j, lax.dynamic_index_in_dim(rest, j, -1, False), 0)
        head = lax.dynamic_index_in_dim(column, j, -1, False)
        modulus = jnp.abs(head)
        phase = jnp.where(modulus == 0, 1, head / jnp.where(modulus == 0, 1, modulus))
        column = jnp.where(rows == j, column + phase[..., None], column)
        column = column / jnp.linalg.norm(column, axis=-1, keepdims=True)
        inner = jnp.sum(column[..., None].conj() * rest, -2, keepdims=True)
        rest = rest - 2 * column[..., None] * inner
        v = lax.dynamic_update_index_in_dim(v, column, j, -1)
        d = lax.dynamic_update_index_in_dim(d, -phase, j, -1)
        return rest, v, d

    start = (work, jnp.zeros_like(work), jnp.ones_like(work[..., 0, :]))
    _, v, d = lax.fori_loop(0, m, step, start)
    return v.astype(q.dtype), d.astype(q.dtype)


@_traced.defjvp
def _traced_jvp(primals, tangents):
    raise ValueError(
        "householder_vectors: it has no derivative. Pass jax.lax.stop_gradient(q), or call it "
        "outside of grad and jvp."
    )


def _on_host(q: Array, count: int, signs: Any) -> Found:
    """Find the vectors of known values, in float64."""
    wide = np.float64
    if jnp.iscomplexobj(q):
        wide = np.complex128
    # NumPy does not know bfloat16.
    work = np.asarray(q.astype(computed_in(q.dtype))).astype(wide)
    n, m = work.shape[-2:]
    error = _checked_error(work, q.dtype)
    if work.size == 0:
        return Found(np.zeros((*work.shape[:-1], count), wide), np.ones((*work.shape[:-2], m)))
    if count < m:
        tolerance = n**0.5 * max(8 * float(jnp.finfo(q.dtype).eps), 2 * error)
        return _few(work, count, tolerance, signs)
    if wide is np.complex128:
        return _by_columns(work)
    return _by_qr(work)


def _checked_error(q: np.ndarray, dtype: Any) -> float:
    """Return max|QᴴQ - I|, or raise unless the matrix is finite and has orthonormal columns."""
    if not np.isfinite(q).all():
        raise ValueError("householder_vectors: the matrix has NaN or infinite entries.")
    if q.size == 0:
        return 0.0
    gap = np.swapaxes(q, -1, -2).conj() @ q - np.eye(q.shape[-1])
    error = float(np.abs(gap).max())
    tolerance = float(jnp.finfo(dtype).eps) ** 0.5
    if error > tolerance:
        raise ValueError(
            f"householder_vectors: the matrix is not orthogonal: max|QᴴQ - I| is {error:.2g}, "
            f"allowed for {dtype} is {tolerance:.2g}. "
            "Orthogonalize it first, e.g. with jnp.linalg.qr."
        )
    return error


def _by_qr(q: np.ndarray) -> Found:
    """Use LAPACK's Householder QR. The R of an orthogonal matrix is diag(±1)."""
    transposed, tau = np.linalg.qr(q, mode="raw")
    a = np.swapaxes(transposed, -1, -2)
    v = np.tril(a, -1) + np.eye(*q.shape[-2:])
    d = np.sign(np.diagonal(a, axis1=-2, axis2=-1))
    # tau = 0 is no reflection. Reflect along e_j instead and flip its sign, so that no vector is
    # dead.
    return Found(v, np.where(tau == 0, -d, d))


def _by_columns(q: np.ndarray) -> Found:
    """Use Hermitian reflections, column by column.

    Each maps its column to the far one of ±phase, where nothing cancels.
    """
    rest = q.copy()
    v = np.zeros_like(q)
    d = np.empty_like(q[..., 0, :])
    for j in range(q.shape[-1]):
        column = rest[..., j:, j].copy()
        others = rest[..., j:, j + 1 :]
        phase = _phase(column[..., 0])
        column[..., 0] += phase
        column /= np.linalg.norm(column, axis=-1, keepdims=True)
        others -= 2 * column[..., None] * (column[..., None, :].conj() @ others)
        v[..., j:, j] = column
        d[..., j] = -phase
    return Found(v, d)


def _phase(x: np.ndarray) -> np.ndarray:
    """Return x/|x|, and 1 for zero."""
    modulus = np.abs(x)
    zero = modulus == 0
    return np.where(zero, 1, x / np.where(zero, 1, modulus))


def _few(q: np.ndarray, count: int, tolerance: float, signs: Any) -> Found:
    """Find fewer reflections than columns, for each N x N matrix of a batch."""
    n = q.shape[-1]
    matrices = q.reshape(-1, n, n)
    hints: Any = [None] * len(matrices)
    if signs is not None:
        hints = np.broadcast_to(np.asarray(signs).astype(q.dtype), q.shape[:-1]).reshape(-1, n)
    found = [
        _by_subspace(one, count, tolerance, hint) for one, hint in zip(matrices, hints, strict=True)
    ]
    v = np.stack([one.v for one in found]).reshape(*q.shape[:-1], count)
    d = np.stack([one.signs for one in found]).reshape(q.shape[:-1])
    return Found(v, d)


def _by_subspace(q: np.ndarray, count: int, tolerance: float, hint: Any) -> Found:
    """Find fewer reflections than columns in the subspace that Q diag(d) moves."""
    n = q.shape[-1]
    eye = np.eye(n, dtype=q.dtype)
    is_complex = np.iscomplexobj(q)
    left = np.inf
    for d in _goals(q, count, tolerance, hint):
        basis, size, _ = np.linalg.svd(q * d.conj() - eye)
        left = min(left, float(size[count]))
        rank = int((size > tolerance).sum())
        # Hermitian reflections of a complex subspace may need more than its dimension. Only one is
        # searched.
        if rank > count or (is_complex and rank > 1):
            continue
        basis = basis[:, :rank]
        vectors = basis
        if not is_complex:
            turned = basis.T @ (q * d) @ basis
            vectors = basis @ _by_pivots(_nearest_orthogonal(turned))
        # The other reflections go along e_k and flip its sign, which is exact and not dead.
        spare = count - rank
        v = np.concatenate([vectors, eye[:, :spare]], -1)
        return Found(v, np.concatenate([-d[:spare], d[spare:]]))
    why = f"{left:.2g} is left over"
    if is_complex:
        why = "of complex ones, a diagonal and one reflection of it are found"
    raise ValueError(
        f"householder_vectors: {count} reflections do not reach this {n} x {n} matrix "
        f"with any signs tried ({why}). Use reflections={n}, which reaches every matrix."
    )


def _goals(q: np.ndarray, count: int, tolerance: float, hint: Any) -> Iterator[np.ndarray]:
    """Yield diagonals d for which Q diag(d)* may differ from the identity by a low rank."""
    if hint is not None:
        yield hint
    nearest = _phase(np.diagonal(q))
    ones = np.ones_like(nearest)
    yield ones
    if not np.iscomplexobj(q):
        # A sign that should be flipped is a coordinate that no fixed vector of Q has.
        _, size, rows = np.linalg.svd(q - np.eye(q.shape[-1]))
        fixed = rows[size <= tolerance]
        if len(fixed):
            absent = np.linalg.norm(fixed, axis=0) <= tolerance
            yield np.where(absent, -ones, ones)
        # The identity starts so.
        yield np.concatenate([-ones[:count], ones[count:]])
    yield nearest


def _nearest_orthogonal(q: np.ndarray) -> np.ndarray:
    u, _, vh = np.linalg.svd(q)
    return u @ vh


def _by_pivots(q: np.ndarray) -> np.ndarray:
    """Return the reflections of a real orthogonal matrix without eigenvalue 1."""
    size = q.shape[-1]
    rest = q.copy()
    vectors = np.zeros((size, size))
    for k in range(size):
        gap = rest - np.eye(size)
        j = int(np.linalg.norm(gap, axis=0).argmax())
        v = gap[:, j].copy()
        if rest[j, j] > 0:
            # q_jj - 1 cancels near 1. This does not.
            v[j] = -(np.square(rest[:, j]).sum() - rest[j, j] ** 2) / (1 + rest[j, j])
        v = v / np.linalg.norm(v)
        rest = rest - 2 * v[:, None] * (v @ rest)
        vectors[:, k] = v
    return vectors
