"""The public functions on reflection vectors: check, choose a backend, compute, round once."""

import math
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._torch import dispatch_mode_count, has_storage
from .. import dispatch
from .._precision import full_precision
from ..checks import check_tensor, sign_error, wrong_sign
from .passes import Backward


class WY(NamedTuple):
    r"""Hold the factors of $Q = I - U T U^H$.

    ``u (*, N, L)`` has unit columns, and ``t (*, L, L)`` $= S^{-1}$ is upper-triangular.
    """

    u: Tensor
    t: Tensor


def _check(call: str, name: str, x: Tensor, dims: int) -> Tensor:
    """Return ``x`` in the dtype it is computed in: half precision becomes float32."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{call}: {name} must be a torch.Tensor, got {type(x).__name__}.")
    check_tensor(call, name, x)
    if x.dim() < dims:
        shape = "(*, N)"
        if dims == 2:
            shape = "(*, N, L)"
        raise ValueError(f"{call}: {name} must have shape {shape}, got {tuple(x.shape)}.")
    if x.dtype in (torch.float16, torch.bfloat16):
        return x.float()
    return x


def _check_signs(
    call: str, signs: Tensor | None, shape: tuple[int, ...], device: torch.device
) -> None:
    """Raise unless signs, if given, are a tensor of this shape on this device."""
    if signs is None:
        return
    if not isinstance(signs, Tensor):
        raise TypeError(
            f"{call}: signs must be a torch.Tensor, got {type(signs).__name__}. "
            "Use torch.tensor(signs)."
        )
    if signs.shape != shape:
        raise ValueError(
            f"{call}: signs must have one number per column of the result, {shape}, "
            f"got {tuple(signs.shape)}."
        )
    if signs.device != device:
        raise ValueError(
            f"{call}: signs must be on {device}, as v is, got {signs.device}. "
            f"Use signs.to({str(device)!r})."
        )
    if signs.dtype == torch.bool:
        raise TypeError(
            f"{call}: signs must be ±1, got {signs.dtype}. "
            "Use torch.where(signs, -1, 1) if True stands for -1."
        )
    if _readable(signs) and (wrong := wrong_sign(signs)) is not None:
        raise sign_error(call, wrong)


def _readable(x: Tensor) -> bool:
    """Return whether values can be read: on a CPU, outside compilers, transforms and modes."""
    if torch.compiler.is_compiling():
        return False
    if type(x) not in (Tensor, torch.nn.Parameter) or x.device.type != "cpu":
        return False
    if not has_storage(x) or dispatch_mode_count() != 0:
        return False
    return dispatch.why_only_aten(x) is None


def _rounded(q: Tensor, v: Tensor, signs: Tensor | None) -> Tensor:
    """Return a result in the dtype of v, or the wider one of v and signs."""
    if signs is None:
        return q.to(v.dtype)
    return q.to(torch.promote_types(v.dtype, signs.dtype))


def _signature(call: str, v: Tensor, signs: Tensor | None, backend: str) -> Hashable:
    """Return all that a planned call depends on, or None for a call that is not planned."""
    if not dispatch.is_plain_eager(v, signs):
        return None
    given = (call, backend, v.shape, v.dtype, v.device)
    if signs is None:
        return given
    return (*given, signs.shape, signs.dtype, signs.device, signs.requires_grad)


def _keep(
    signature: Hashable,
    find: Callable[..., Callable[..., Any] | None] | None,
    v: Tensor,
    signs: Tensor | None,
    wanted: str,
) -> None:
    """Keep a call for the next tensors like these, if the backend finds one."""
    if signature is None or find is None or v.dtype != torch.float32:
        return
    call = find(v, signs, wanted)
    if call is not None:
        dispatch.keep_plan(signature, call)


def wy_factors(v: Tensor, *, backend: str = "auto") -> WY:
    r"""Compute the factors of a product of Householder reflections.

    With $u_i = v_i/\lVert v_i\rVert$,
    $$ H(v_1)\cdots H(v_L) = I - U T U^H, \quad T = S^{-1}, \quad
       S = \tfrac12 I + \mathrm{striu}(U^H U). $$

    Args:
        v: ``(*, N, L)``, the reflection vectors as columns. A zero column stands for no reflection.
        backend: "auto", or one of those that ``cwy info`` lists.

    Returns:
        ``WY(u, t)``: ``u (*, N, L)`` with unit columns and ``t (*, L, L)`` upper-triangular, no
        entry above 4. For half-precision ``v`` they are float32.

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
    r"""Compute a product of Householder reflections at once (compact WY).

    With $u_i = v_i/\lVert v_i\rVert$,
    $$ Q = H(v_1)\cdots H(v_L) = I - U S^{-1} U^H, \quad S = \tfrac12 I + \mathrm{striu}(U^H U). $$

    Args:
        v: ``(*, N, L)``, the reflection vectors as columns. A zero column stands for no reflection.
        signs: ``(*, N)``, ±1 (complex: of modulus 1), with which the columns of Q are multiplied.
            Other numbers raise on a CPU. On a GPU a check would synchronize with the host, so they
            scale the columns.
        backend: "auto", or one of those that ``cwy info`` lists.

    Returns:
        ``(*, N, N)``, orthogonal (unitary, for complex ``v``). Its determinant is $(-1)^L$ times
        that of the signs.

    Example:
        >>> q = cwy_matrix(torch.randn(6, 4, dtype=torch.float64))
        >>> orthogonality_error(q) < 1e-14
        True

    References:
        Likhosherstov et al., CWY parametrization, 2021, Theorem 2.
    """
    signature = _signature("cwy_matrix", v, signs, backend)
    # A compiler must not see the plans: it would guard its program by them.
    if signature is not None:
        planned = dispatch.planned(signature)
        if planned is not None:
            return planned(v, signs)
    work = _check("cwy_matrix", "v", v, 2)
    _check_signs("cwy_matrix", signs, (*v.shape[:-2], v.shape[-2]), v.device)
    module = dispatch.choose("wy", backend, work)
    _keep(signature, getattr(module, "planned", None), v, signs, "matrix")
    return _rounded(module.cwy_matrix(work, signs), v, signs)


def tcwy_matrix(v: Tensor, *, signs: Tensor | None = None, backend: str = "auto") -> Tensor:
    r"""Compute the first M columns of a product of M reflections (truncated compact WY).

    No N x N matrix is formed, forward or backward.
    $$ \Omega = \begin{bmatrix} I \\ 0 \end{bmatrix} - U S^{-1} U_1^H, \quad
       U_1 = \text{the first } M \text{ rows of } U. $$

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
    signature = _signature("tcwy_matrix", v, signs, backend)
    # A compiler must not see the plans: it would guard its program by them.
    if signature is not None:
        planned = dispatch.planned(signature)
        if planned is not None:
            return planned(v, signs)
    work = _check("tcwy_matrix", "v", v, 2)
    n, m = v.shape[-2:]
    if m > n:
        raise ValueError(
            f"tcwy_matrix: v must be (*, N, M) with M <= N, got N = {n}, M = {m}. "
            "Transpose it, or drop columns."
        )
    _check_signs("tcwy_matrix", signs, (*v.shape[:-2], m), v.device)
    module = dispatch.choose("wy", backend, work)
    _keep(signature, getattr(module, "planned", None), v, signs, "truncated")
    return _rounded(module.tcwy_matrix(work, signs), v, signs)


def matrix_and_pull_back(
    v: Tensor, signs: Tensor, *, truncated: bool = False
) -> tuple[Tensor, Backward] | None:
    """Compute :func:`cwy_matrix` or :func:`tcwy_matrix` without a graph, and its backward pass.

    Callers that have a graph of their own save the time of a second one.

    Args:
        v: ``(*, N, L)``, the reflection vectors.
        signs: as in :func:`cwy_matrix`. They get no gradient.
        truncated: whether only the first L columns are wanted.

    Returns:
        The matrix and its backward pass, or None for tensors of which only autograd knows it.
    """
    call = "cwy_matrix"
    wanted = "matrix"
    columns = v.shape[-2]
    if truncated:
        call = "tcwy_matrix"
        wanted = "truncated"
        columns = v.shape[-1]
    signature = _signature(f"{call} with its backward pass", v, signs, "auto")
    if signature is None:
        return None
    planned = dispatch.planned(signature)
    if planned is not None:
        return planned(v, signs)
    if v.dtype not in (torch.float32, torch.float64) or signs.dtype != v.dtype:
        return None
    _check_signs(call, signs, (*v.shape[:-2], columns), v.device)
    module = dispatch.choose("wy", "auto", v)
    _keep(signature, getattr(module, "planned_passes", None), v, signs, wanted)
    device = v.device.type
    with torch.no_grad(), full_precision(device):
        if truncated:
            result, *kept = module.forward_truncated(v, signs)
        else:
            result, *kept = module.forward_matrix(v, signs)
            kept = [result, *kept]

    def pull_back(gradient: Tensor, *kept: Tensor) -> Tensor:
        with torch.no_grad(), full_precision(device):
            if truncated:
                return module.backward_truncated(gradient, *kept)
            return module.backward_matrix(gradient, *kept)

    return result, Backward(pull_back, (*kept, signs))


def cwy_multiply(
    v: Tensor | WY, x: Tensor, adjoint: bool = False, *, backend: str = "auto"
) -> Tensor:
    r"""Compute $Qx$ or $Q^H x$ for each vector of ``x``, without forming $Q = H(v_1)\cdots H(v_L)$.

    Args:
        v: ``(*, N, L)`` reflection vectors, or their factors (:func:`wy_factors`) when several
            calls share them.
        x: ``(*, ..., N)``. Its leading dimensions begin with the batch of ``v``.
        adjoint: multiply by $Q^H$, the inverse of $Q$.
        backend: "auto", or one of those that ``cwy info`` lists. Factors have only "composite".

    Returns:
        The shape of ``x``, in the wider dtype of the two. Every vector keeps its norm.

    Example:
        >>> v, x = torch.randn(64, 8, dtype=torch.float64), torch.randn(5, 64, dtype=torch.float64)
        >>> y = cwy_multiply(v, x)
        >>> torch.allclose(cwy_multiply(v, y, adjoint=True), x)
        True
    """
    if isinstance(v, WY):
        vectors = v.u
    else:
        vectors = v
    work = _check("cwy_multiply", "v", vectors, 2)
    rows = _check("cwy_multiply", "x", x, 1)
    batch = _check_rows(vectors, x)
    dtype = torch.promote_types(work.dtype, rows.dtype)
    work = work.to(dtype)
    rows = rows.to(dtype).reshape(*batch, math.prod(x.shape[len(batch) : -1]), x.shape[-1])
    if isinstance(v, WY):
        module = _module_for_factors(backend, work, rows)
        y = module.multiply_by_factors(work, v.t.to(dtype), rows, adjoint)
    else:
        module = dispatch.choose("wy", backend, work, rows)
        y = module.cwy_multiply(work, rows, adjoint)
    return y.reshape(x.shape).to(torch.promote_types(vectors.dtype, x.dtype))


def _check_rows(vectors: Tensor, x: Tensor) -> torch.Size:
    """Return the batch of the vectors, or raise unless ``x`` can be multiplied by them."""
    if x.device != vectors.device:
        raise ValueError(f"cwy_multiply: x must be on {vectors.device}, as v is, got {x.device}.")
    batch = vectors.shape[:-2]
    n = vectors.shape[-2]
    if x.shape[-1] != n or x.shape[:-1][: len(batch)] != batch:
        raise ValueError(
            f"cwy_multiply: v is {tuple(vectors.shape)}, so x must be {(*batch, '...', n)}, "
            f"got {tuple(x.shape)}. The last dimension of x holds the vectors."
        )
    return batch


def _module_for_factors(backend: str, *tensors: Tensor) -> ModuleType:
    """Return the only module that multiplies by factors."""
    if backend not in ("auto", "composite"):
        raise ValueError(
            f'cwy_multiply: factors have only the backend "composite", not "{backend}". '
            "Pass the vectors."
        )
    return dispatch.choose("wy", "composite", *tensors)
