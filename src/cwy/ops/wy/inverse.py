"""From a matrix back to reflection vectors: the constructive proofs of Theorems 1 and 3."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from .._linalg import check_orthonormal, double, matrix_error, nearest_orthogonal


class Reflections(NamedTuple):
    r"""Hold reflection vectors and signs with $Q = H(v_1)\cdots H(v_L)\,\mathrm{diag}(s)$.

    Attributes:
        v: ``(*, N, L)``, the vectors as columns.
        signs: ``(*, M)``.
    """

    v: Tensor
    signs: Tensor


def householder_vectors(
    q: Tensor, reflections: int | None = None, *, signs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Find reflection vectors of an orthogonal matrix, the inverse of :func:`cwy_matrix`.

    It finds $Q = H(v_1)\cdots H(v_L)\,\mathrm{diag}(s)$, also for :func:`tcwy_matrix`. As many
    reflections as columns reach every matrix. Fewer reach those $Q$ for which
    $Q\,\mathrm{diag}(s) - I$ has rank at most L. For complex $Q$, fewer find only a diagonal and a
    single reflection of it.

    Args:
        q: ``(*, N, M)`` with orthonormal columns, $N \ge M$.
        reflections: L, by default M. Only a square matrix may have fewer than M.
        signs: ``(*, M)``, the signs to try first when L < N. By default these are +1, then the
            signs of q's diagonal.

    Returns:
        ``(v, signs)``: ``v (*, N, L)`` with unit columns, none of them zero, and ``signs (*, M)``,
        ±1 (for complex ``q``, complex numbers of modulus 1).

    Example:
        >>> q = torch.linalg.qr(torch.randn(7, 7, dtype=torch.float64)).Q
        >>> v, signs = householder_vectors(q)
        >>> torch.allclose(cwy_matrix(v) * signs, q)
        True
    """
    v, signs = vectors_near(q, reflections, signs)
    return v, signs


def vectors_near(
    q: Tensor, reflections: int | None, signs: Tensor | None, slack: float = 0.0
) -> Reflections:
    """Find the vectors of :func:`householder_vectors`, also of a matrix that is nearly reached.

    Args:
        q, reflections, signs: as there.
        slack: how far, in the spectral norm, the matrix of fewer reflections than columns may be
            from ``q``.
    """
    check_orthonormal("householder_vectors", q)
    if dispatch.why_only_autograd(q) is not None or (q.requires_grad and torch.is_grad_enabled()):
        raise ValueError(
            "householder_vectors: it has no derivative. "
            "Pass q.detach(), outside torch.func and forward-mode AD."
        )
    n, m = q.shape[-2:]
    count = m
    if reflections is not None:
        count = reflections
    _check_count(count, n, m)
    work = double(q)
    if q.numel() == 0:
        v = work.new_zeros(*q.shape[:-1], count)
        found = Reflections(v, work.new_ones(*q.shape[:-2], m))
    elif count < m:
        rounding = n**0.5 * max(8 * torch.finfo(q.dtype).eps, 2 * matrix_error(q))
        found = _few(work, count, max(rounding, slack), signs)
    elif q.is_complex():
        found = _by_columns(work)
    else:
        found = _by_qr(work)
    v = found.v / torch.linalg.vector_norm(found.v, dim=-2, keepdim=True)
    like = {"device": q.device, "dtype": q.dtype}
    return Reflections(v.to(**like), found.signs.to(**like))


def _check_count(count: int, n: int, m: int) -> None:
    """Raise unless so many reflections can make an ``n`` x ``m`` matrix."""
    if n == m:
        right = 1 <= count <= m
        allowed = f"between 1 and {m}"
    else:
        right = count == m and m >= 1
        allowed = f"{m}, the number of columns"
    if not right:
        raise ValueError(f"householder_vectors: reflections must be {allowed}, got {count}.")


def _by_qr(q: Tensor) -> Reflections:
    """Use LAPACK's Householder QR. The R of an orthogonal matrix is diag(±1)."""
    a, tau = torch.geqrf(q)
    v = a.tril(-1)
    v.diagonal(dim1=-2, dim2=-1).fill_(1)
    d = a.diagonal(dim1=-2, dim2=-1).sign()
    # tau = 0 is no reflection. Reflect along e_j instead and flip its sign, so that no vector is
    # dead.
    return Reflections(v, torch.where(tau == 0, -d, d))


def _by_columns(q: Tensor) -> Reflections:
    """Use Hermitian reflections, column by column.

    Each maps its column to the far one of ±phase, where nothing cancels.
    """
    rest = q.clone()
    v = torch.zeros_like(q)
    d = torch.empty_like(q[..., 0, :])
    for j in range(q.shape[-1]):
        column = rest[..., j:, j].clone()
        others = rest[..., j:, j + 1 :]
        modulus = column[..., 0].abs()
        phase = torch.where(modulus == 0, 1, column[..., 0] / modulus)
        column[..., 0] += phase
        column /= torch.linalg.vector_norm(column, dim=-1, keepdim=True)
        others -= 2 * column[..., None] * (column[..., None, :].conj() @ others)
        v[..., j:, j] = column
        d[..., j] = -phase
    return Reflections(v, d)


def _few(q: Tensor, count: int, tolerance: float, signs: Tensor | None) -> Reflections:
    """Find fewer reflections than columns, for each N x N matrix of a batch."""
    n = q.shape[-1]
    matrices = q.reshape(-1, n, n)
    hints = [None] * len(matrices)
    if signs is not None:
        hints = double(signs).reshape(-1, n)
    found = [
        _by_subspace(one, count, tolerance, hint) for one, hint in zip(matrices, hints, strict=True)
    ]
    v = torch.stack([one.v for one in found]).reshape(*q.shape[:-1], count)
    d = torch.stack([one.signs for one in found]).reshape(q.shape[:-1])
    return Reflections(v, d)


def _by_subspace(q: Tensor, count: int, tolerance: float, hint: Tensor | None) -> Reflections:
    """Find fewer reflections than columns in the subspace that Q diag(d) moves."""
    n = q.shape[-1]
    eye = torch.eye(n, dtype=q.dtype, device=q.device)
    left = float("inf")
    for d in _goals(q, count, tolerance, hint):
        gap = q * d.conj() - eye
        least = _beyond_rank(gap, count)
        left = min(left, least)
        if least > tolerance:
            continue
        basis = _moved(gap, tolerance)
        rank = basis.shape[-1]
        # Hermitian reflections of a complex subspace may need more than its dimension. Only one is
        # searched.
        if rank > count or (q.is_complex() and rank > 1):
            continue
        vectors = basis
        if not q.is_complex():
            turned = nearest_orthogonal(basis.mH @ (q * d.conj()) @ basis)
            vectors = basis @ _by_pivots(turned)
        # The other reflections go along e_k and flip its sign, which is exact and not dead.
        spare = count - rank
        v = torch.stack([*vectors.unbind(-1), *eye[:spare]], -1)
        return Reflections(v, torch.cat([-d[:spare], d[spare:]]))
    why = f"{left:.2g} is left over"
    if q.is_complex():
        why = "of complex ones, a diagonal and one reflection of it are found"
    raise ValueError(
        f"householder_vectors: {count} reflections do not reach this {n} x {n} matrix "
        f"with any signs tried ({why}). Use reflections={n}, which reaches every matrix."
    )


def _moved(gap: Tensor, tolerance: float) -> Tensor:
    """Return an orthonormal basis of what ``gap (N, N)`` does not map to zero."""
    n = gap.shape[-1]
    if gap.abs().max() <= tolerance / n:
        return gap.new_empty(n, 0)
    u, size, _ = torch.linalg.svd(gap)
    rank = int((size.abs() > tolerance).sum())
    return u[:, :rank]


def _goals(q: Tensor, count: int, tolerance: float, hint: Tensor | None) -> Iterator[Tensor]:
    """Yield diagonals d for which Q diag(d)* may differ from the identity by a low rank."""
    if hint is not None:
        yield hint
    modulus = q.diagonal().abs()
    nearest = torch.where(modulus == 0, 1, q.diagonal() / modulus)
    ones = torch.ones_like(nearest)
    yield ones
    if not q.is_complex():
        # A sign that should be flipped is a coordinate that no fixed vector of Q has.
        gap = q - torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
        if torch.linalg.lu_factor_ex(gap).LU.diagonal().abs().min() <= tolerance:
            _, size, rows = torch.linalg.svd(gap)
            absent = torch.linalg.vector_norm(rows[size <= tolerance], dim=0) <= tolerance
            yield torch.where(absent, -ones, ones)
        # init="identity" starts so.
        yield torch.cat([-ones[:count], ones[count:]])
    yield nearest


def _beyond_rank(gap: Tensor, rank: int) -> float:
    """Return a lower bound of the (rank + 1)-th singular value, by a sketch that saves an SVD."""
    g = torch.Generator(device=gap.device).manual_seed(0)
    normal = torch.randn(gap.shape[-1], rank + 1, dtype=gap.dtype, device=gap.device, generator=g)
    sketch = torch.linalg.qr(normal).Q
    return torch.linalg.svdvals(gap @ sketch)[rank].item()


def _by_pivots(q: Tensor) -> Tensor:
    """Return the reflections of a real orthogonal matrix without eigenvalue 1."""
    size = q.shape[-1]
    if size == 0:
        return q
    rest = q.clone()
    vectors = []
    for _ in range(size):
        gap = rest - torch.eye(size, dtype=q.dtype, device=q.device)
        far = torch.linalg.vector_norm(gap, dim=0)
        j = int(far.argmax())
        v = gap[:, j].clone()
        if rest[j, j] > 0:
            # q_jj - 1 cancels near 1. This does not.
            v[j] = -(rest[:, j].square().sum() - rest[j, j] ** 2) / (1 + rest[j, j])
        v = v / torch.linalg.vector_norm(v)
        rest = rest - 2 * v[:, None] * (v @ rest)
        vectors.append(v)
    return torch.stack(vectors, -1)
