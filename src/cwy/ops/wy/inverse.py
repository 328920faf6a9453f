"""From a matrix back to reflection vectors: the constructive proofs of Theorems 1 and 3."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import dispatch
from .._linalg import check_orthonormal, double, matrix_error, nearest_orthogonal


def householder_vectors(
    q: Tensor, reflections: int | None = None, *, signs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Reflection vectors of an orthogonal matrix: the inverse of :func:`cwy_matrix` and :func:`tcwy_matrix`.

    Finds $Q = H(v_1)\cdots H(v_L)\,\mathrm{diag}(s)$. With as many reflections as columns every matrix is reached; with
    fewer, those $Q$ for which $Q\,\mathrm{diag}(s) - I$ has rank at most L. (Of complex ones, only a diagonal
    and a single reflection of it are found.)

    Args:
        q: ``(*, N, M)`` with orthonormal columns, $N \ge M$.
        reflections: L, by default M. Only a square matrix may have fewer than M.
        signs: ``(*, M)``, the signs to try first when L < N; by default +1, then those of q's diagonal.

    Returns:
        ``(v, signs)``: ``v (*, N, L)`` with unit columns, none of them zero, and ``signs (*, M)``, ±1
        (for complex ``q``, complex numbers of modulus 1).

    Example:
        >>> q = torch.linalg.qr(torch.randn(7, 7, dtype=torch.float64)).Q
        >>> v, signs = householder_vectors(q)
        >>> torch.allclose(cwy_matrix(v) * signs, q)
        True
    """
    return vectors_near(q, reflections, signs)


def vectors_near(
    q: Tensor, reflections: int | None, signs: Tensor | None, slack: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the vectors and signs of :func:`householder_vectors`, also for a matrix that few reflections nearly reach.

    Args:
        q, reflections, signs: as there.
        slack: how far, in the spectral norm, the matrix of fewer reflections than columns may be from ``q``.
    """
    check_orthonormal("householder_vectors", q)
    if dispatch.why_only_autograd(q) is not None or (q.requires_grad and torch.is_grad_enabled()):
        raise ValueError(
            "householder_vectors: it has no derivative. Pass q.detach(), outside torch.func and forward-mode AD."
        )
    n, m = q.shape[-2:]
    count = m if reflections is None else reflections
    if not 1 <= count <= m or (n > m and count != m):
        allowed = f"between 1 and {m}" if n == m else f"{m}, the number of columns"
        raise ValueError(f"householder_vectors: reflections must be {allowed}, got {count}.")
    work = double(q)
    if q.numel() == 0:
        v, d = work.new_zeros(*q.shape[:-1], count), work.new_ones(*q.shape[:-2], m)
    elif count < m:
        hints = [None] * work[..., 0, 0].numel() if signs is None else double(signs).reshape(-1, m)
        rounding = n**0.5 * max(8 * torch.finfo(q.dtype).eps, 2 * matrix_error(q))
        tolerance = max(rounding, slack)
        found = [
            _by_subspace(one, count, tolerance, hint)
            for one, hint in zip(work.reshape(-1, n, n), hints, strict=True)
        ]
        v = torch.stack([f[0] for f in found]).reshape(*q.shape[:-2], n, count)
        d = torch.stack([f[1] for f in found]).reshape(*q.shape[:-2], m)
    else:
        v, d = _by_columns(work) if q.is_complex() else _by_qr(work)
    v = v / torch.linalg.vector_norm(v, dim=-2, keepdim=True)
    return v.to(device=q.device, dtype=q.dtype), d.to(device=q.device, dtype=q.dtype)


def _by_qr(q: Tensor) -> tuple[Tensor, Tensor]:
    """LAPACK's Householder QR: the R of an orthogonal matrix is diag(±1)."""
    a, tau = torch.geqrf(q)
    v = a.tril(-1)
    v.diagonal(dim1=-2, dim2=-1).fill_(1)
    d = a.diagonal(dim1=-2, dim2=-1).sign()
    # tau = 0 is no reflection: reflect along e_j instead and flip its sign, so that no vector is dead.
    return v, torch.where(tau == 0, -d, d)


def _by_columns(q: Tensor) -> tuple[Tensor, Tensor]:
    """Hermitian reflections, a column at a time: each goes to the far one of ±phase, where nothing cancels."""
    rest, v, d = q.clone(), torch.zeros_like(q), torch.empty_like(q[..., 0, :])
    for j in range(q.shape[-1]):
        column, others = rest[..., j:, j].clone(), rest[..., j:, j + 1 :]
        modulus = column[..., 0].abs()
        phase = torch.where(modulus == 0, 1, column[..., 0] / modulus)
        column[..., 0] += phase
        column /= torch.linalg.vector_norm(column, dim=-1, keepdim=True)
        others -= 2 * column[..., None] * (column[..., None, :].conj() @ others)
        v[..., j:, j], d[..., j] = column, -phase
    return v, d


def _by_subspace(
    q: Tensor, count: int, tolerance: float, hint: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Fewer reflections than columns, for one N x N matrix: they live in the subspace that Q diag(d) moves."""
    n = q.shape[-1]
    eye = torch.eye(n, dtype=q.dtype, device=q.device)
    left = float("inf")
    for d in _goals(q, count, tolerance, hint):
        gap = q * d.conj() - eye
        least = _beyond_rank(gap, count)
        left = min(left, least)
        if least > tolerance:
            continue
        moved, size, _ = (
            torch.linalg.svd(gap)
            if gap.abs().max() > tolerance / n
            else (eye, eye.new_zeros(n), eye)
        )
        rank = int((size.abs() > tolerance).sum())
        # Hermitian reflections of a complex subspace may need more than its dimension: one is found, or none.
        if rank > count or (q.is_complex() and rank > 1):
            continue
        basis = moved[:, :rank]
        turned = nearest_orthogonal(basis.mH @ (q * d.conj()) @ basis)
        vectors = [*(basis if q.is_complex() else basis @ _by_pivots(turned)).unbind(-1)]
        # The reflections left over go along e_k and flip its sign: exact, and not dead.
        spare = count - len(vectors)
        return torch.stack([*vectors, *eye[:spare]], -1), torch.cat([-d[:spare], d[spare:]])
    why = (
        "of complex ones, a diagonal and one reflection of it are found"
        if q.is_complex()
        else f"{left:.2g} is left over"
    )
    raise ValueError(
        f"householder_vectors: {count} reflections do not reach this {n} x {n} matrix with any signs tried ({why}). "
        f"Use reflections={n}, which reaches every matrix."
    )


def _goals(q: Tensor, count: int, tolerance: float, hint: Tensor | None) -> Iterator[Tensor]:
    """Diagonals d to try, for which Q diag(d)* may differ from the identity by a low rank."""
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
        # As init="identity" starts.
        yield torch.cat([-ones[:count], ones[count:]])
    yield nearest


def _beyond_rank(gap: Tensor, rank: int) -> float:
    """A lower bound of the (rank + 1)-th singular value, by a sketch: it tells at once what no SVD need look at."""
    g = torch.Generator(device=gap.device).manual_seed(0)
    sketch = torch.linalg.qr(
        torch.randn(gap.shape[-1], rank + 1, dtype=gap.dtype, device=gap.device, generator=g)
    ).Q
    return torch.linalg.svdvals(gap @ sketch)[rank].item()


def _by_pivots(q: Tensor) -> Tensor:
    """The reflections of a real orthogonal matrix without eigenvalue 1, as many as it has columns."""
    rest, vectors = q.clone(), []
    for _ in range(q.shape[-1]):
        gap = rest - torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
        far = torch.linalg.vector_norm(gap, dim=0)
        j = int(far.argmax())
        v = gap[:, j].clone()
        if rest[j, j] > 0:
            # q_jj - 1 cancels near 1; this does not.
            v[j] = -(rest[:, j].square().sum() - rest[j, j] ** 2) / (1 + rest[j, j])
        v = v / torch.linalg.vector_norm(v)
        rest = rest - 2 * v[:, None] * (v @ rest)
        vectors.append(v)
    return torch.stack(vectors, -1) if vectors else q
