"""The public functions on reflection vectors: check, choose a backend, compute, round once at the end."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..._torch import dispatch_mode_count, has_storage
from .. import dispatch
from ..checks import check_tensor, wrong_sign
from . import autograd, composite, cuda, reference

dispatch.provide(
    "wy",
    dispatch.Backend(
        "cuda",
        cuda,
        "eager mode, float32 on an NVIDIA GPU: fused kernels",
        cuda.why_not,
        cuda.why_pass,
    ),
    dispatch.Backend(
        "analytic", autograd, "eager mode: hand-written backward", dispatch.why_only_aten
    ),
    dispatch.Backend(
        "composite", composite, "torch.compile, torch.export, torch.func, forward-mode AD: ATen ops"
    ),
    dispatch.Backend(
        "reference", reference, "one reflection at a time: the definition, for checking"
    ),
)


class WY(NamedTuple):
    r"""The factors of $Q = I - U T U^H$: ``u (*, N, L)`` with unit columns, ``t`` $= S^{-1}$ ``(*, L, L)`` upper-triangular."""

    u: Tensor
    t: Tensor


def _check(call: str, name: str, x: Tensor, dims: int) -> Tensor:
    """``x`` in the dtype it is computed in: half precision becomes float32."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{call}: {name} must be a torch.Tensor, got {type(x).__name__}.")
    check_tensor(call, name, x)
    if x.dim() < dims:
        shape = "(*, N, L)" if dims == 2 else "(*, N)"
        raise ValueError(f"{call}: {name} must have shape {shape}, got {tuple(x.shape)}.")
    if x.dtype in (torch.float16, torch.bfloat16):
        return x.float()
    return x


def _check_signs(
    call: str, signs: Tensor | None, shape: tuple[int, ...], device: torch.device
) -> None:
    """Raises unless signs, if given, are a tensor of this shape on this device."""
    if signs is None:
        return
    if not isinstance(signs, Tensor):
        raise TypeError(
            f"{call}: signs must be a torch.Tensor, got {type(signs).__name__}. Use torch.tensor(signs)."
        )
    if signs.shape != shape:
        raise ValueError(
            f"{call}: signs must have one number a column of the result, {shape}, got {tuple(signs.shape)}."
        )
    if signs.device != device:
        raise ValueError(
            f"{call}: signs must be on {device}, as v is, got {signs.device}. Use signs.to({str(device)!r})."
        )
    if signs.dtype == torch.bool:
        raise TypeError(
            f"{call}: signs must be ±1, got {signs.dtype}. Use torch.where(signs, -1, 1) if True stands for -1."
        )
    if _readable(signs) and (wrong := wrong_sign(signs)) is not None:
        raise ValueError(
            f"{call}: signs must be ±1 (complex: of modulus 1), got {wrong}. Use torch.sgn(signs)."
        )


def _readable(x: Tensor) -> bool:
    """Whether values can be read at once: on a CPU, outside compilers, transforms and modes."""
    if torch.compiler.is_compiling():
        return False
    if type(x) not in (Tensor, torch.nn.Parameter) or x.device.type != "cpu":
        return False
    if not has_storage(x) or dispatch_mode_count() != 0:
        return False
    return dispatch.why_only_aten(x) is None


def _signed(name: str, v: Tensor, work: Tensor, signs: Tensor | None, backend: str) -> Tensor:
    """What a backend makes of ``work``, its columns times signs, rounded as v is; the kernels do all at once."""
    module = dispatch.choose("wy", backend, work)
    form = getattr(module, name)
    if signs is None:
        return form(work).to(v.dtype)
    alike = module is cuda and signs.dtype == work.dtype
    if alike and not signs.requires_grad and dispatch.why_only_autograd(signs) is None:
        q = form(work, signs)
    else:
        q = form(work) * signs.unsqueeze(-2)
    return q.to(torch.promote_types(v.dtype, signs.dtype))


def wy_factors(v: Tensor, *, backend: str = "auto") -> WY:
    r"""Factors of a product of Householder reflections.

    With $u_i = v_i/\lVert v_i\rVert$,
    $$ H(v_1)\cdots H(v_L) = I - U T U^H, \quad T = S^{-1}, \quad S = \tfrac12 I + \mathrm{striu}(U^H U). $$

    Args:
        v: ``(*, N, L)``, the reflection vectors as columns. A zero column stands for no reflection.
        backend: "auto", or one of those that ``cwy info`` lists.

    Returns:
        ``WY(u, t)``: ``u (*, N, L)`` with unit columns and ``t (*, L, L)`` upper-triangular, no entry above 4.
        For half-precision ``v`` they are float32.

    Example:
        >>> u, t = wy_factors(torch.randn(6, 4, dtype=torch.float64))
        >>> q = torch.eye(6) - u @ t @ u.mT
        >>> orthogonality_error(q) < 1e-14
        True

    References:
        Joffrain et al., Accumulating Householder transformations, revisited, 2006.
    """
    work = _check("wy_factors", "v", v, 2)
    return WY(*dispatch.choose("wy", backend, work).wy_factors(work))


def cwy_matrix(v: Tensor, *, signs: Tensor | None = None, backend: str = "auto") -> Tensor:
    r"""Product of Householder reflections, formed at once (compact WY).

    With $u_i = v_i/\lVert v_i\rVert$,
    $$ Q = H(v_1)\cdots H(v_L) = I - U S^{-1} U^H, \quad S = \tfrac12 I + \mathrm{striu}(U^H U). $$

    Args:
        v: ``(*, N, L)``, the reflection vectors as columns. A zero column stands for no reflection.
        signs: ``(*, N)``, ±1, with which the columns of Q are multiplied, if given; complex ones are of modulus 1. Others are
            refused on a CPU. On a GPU, where a check would synchronize with the host, they scale the columns.
        backend: "auto", or one of those that ``cwy info`` lists.

    Returns:
        ``(*, N, N)``, orthogonal (unitary, for complex ``v``), of determinant $(-1)^L$, times the signs'.

    Example:
        >>> q = cwy_matrix(torch.randn(6, 4, dtype=torch.float64))
        >>> orthogonality_error(q) < 1e-14
        True

    References:
        Likhosherstov et al., CWY parametrization, 2021, Theorem 2.
    """
    work = _check("cwy_matrix", "v", v, 2)
    _check_signs("cwy_matrix", signs, (*v.shape[:-2], v.shape[-2]), v.device)
    return _signed("cwy_matrix", v, work, signs, backend)


def tcwy_matrix(v: Tensor, *, signs: Tensor | None = None, backend: str = "auto") -> Tensor:
    r"""The first M columns of a product of M reflections (truncated compact WY), with no N x N object anywhere.

    $$ \Omega = \begin{bmatrix} I \\ 0 \end{bmatrix} - U S^{-1} U_1^H, \quad U_1 = \text{the first } M \text{ rows of } U. $$

    Args:
        v: ``(*, N, M)`` with $M \le N$, the reflection vectors as columns.
        signs: ``(*, M)``, as in :func:`cwy_matrix`.
        backend: "auto", or one of those that ``cwy info`` lists.

    Returns:
        ``(*, N, M)``, with orthonormal columns: a point of St(N, M).

    Example:
        >>> omega = tcwy_matrix(torch.randn(1000, 3, dtype=torch.float64))
        >>> omega.shape, orthogonality_error(omega) < 1e-14
        (torch.Size([1000, 3]), True)

    References:
        Likhosherstov et al., CWY parametrization, 2021, Theorem 3.
    """
    work = _check("tcwy_matrix", "v", v, 2)
    n, m = v.shape[-2:]
    if m > n:
        raise ValueError(
            f"tcwy_matrix: v must be (*, N, M) with M <= N, got N = {n}, M = {m}. Transpose it, or drop columns."
        )
    _check_signs("tcwy_matrix", signs, (*v.shape[:-2], m), v.device)
    return _signed("tcwy_matrix", v, work, signs, backend)


def cwy_multiply(
    v: Tensor | WY, x: Tensor, adjoint: bool = False, *, backend: str = "auto"
) -> Tensor:
    r"""$Qx$ (or $Q^H x$) for each vector of ``x``, without ever forming $Q = H(v_1)\cdots H(v_L)$.

    Args:
        v: ``(*, N, L)`` reflection vectors, or their factors (:func:`wy_factors`) when several calls share them.
        x: ``(*, ..., N)``; its leading dimensions begin with the batch of ``v``.
        adjoint: multiply by $Q^H$, the inverse of $Q$.
        backend: "auto", or one of those that ``cwy info`` lists; factors have only "composite".

    Returns:
        The shape of ``x``, in the wider dtype of the two; every vector keeps its norm.

    Example:
        >>> v, x = torch.randn(64, 8, dtype=torch.float64), torch.randn(5, 64, dtype=torch.float64)
        >>> y = cwy_multiply(v, x)
        >>> torch.allclose(cwy_multiply(v, y, adjoint=True), x)
        True
    """
    vectors = v.u if isinstance(v, WY) else v
    work = _check("cwy_multiply", "v", vectors, 2)
    rows = _check("cwy_multiply", "x", x, 1)
    if x.device != vectors.device:
        raise ValueError(f"cwy_multiply: x must be on {vectors.device}, as v is, got {x.device}.")
    batch, n = vectors.shape[:-2], vectors.shape[-2]
    if x.shape[-1] != n or x.shape[:-1][: len(batch)] != batch:
        raise ValueError(
            f"cwy_multiply: v is {tuple(vectors.shape)}, so x must be {(*batch, '...', n)}, got {tuple(x.shape)}. "
            "The last dimension of x holds the vectors."
        )
    dtype = torch.promote_types(work.dtype, rows.dtype)
    rows = rows.to(dtype).reshape(*batch, math.prod(x.shape[len(batch) : -1]), n)
    if isinstance(v, WY):
        if backend not in ("auto", "composite"):
            raise ValueError(
                f'cwy_multiply: factors have the backend "composite" alone, not "{backend}". Pass the vectors.'
            )
        y = composite.multiply_by_factors(work.to(dtype), v.t.to(dtype), rows, adjoint)
    else:
        work = work.to(dtype)
        y = dispatch.choose("wy", backend, work, rows).cwy_multiply(work, rows, adjoint)
    return y.reshape(x.shape).to(torch.promote_types(vectors.dtype, x.dtype))
