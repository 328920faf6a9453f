"""The public function: check, choose, compute."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import dispatch
from ..checks import check_tensor
from . import composite
from . import registered as registered  # registers the op


def reflect(x: Tensor, v: Tensor, adjoint: bool = False) -> Tensor:
    r"""Compute $Qx$ or $Q^\top x$ for each vector of ``x``, in the dtype of ``x``.

    With $u_i = v_i/\lVert v_i\rVert$,
    $$ Q = H(v_1)\cdots H(v_L) = I - U T U^\top, \quad T^{-1} = \tfrac12 I +
       \mathrm{striu}(U^\top U). $$

    Unlike :func:`cwy_multiply`, half-precision activations stay as they are. The factors are
    computed in float32, under any autocast. If $N \ge 8L$ they are then rounded to the dtype
    of ``x``, with T from the rounded U. The backward pass keeps ``x`` and L numbers per vector.

    Args:
        x: ``(..., N)``, real.
        v: ``(N, L)``, the reflection vectors as columns, of any real dtype, or ``(B, N/B, L)`` for
            a block-diagonal matrix. A zero column stands for no reflection. L may exceed N.
        adjoint: multiply by $Q^\top$, the inverse of $Q$.

    Returns:
        The shape and dtype of ``x``. Every vector keeps its norm, up to the rounding of its dtype.

    Example:
        >>> x = torch.randn(5, 64, dtype=torch.bfloat16)
        >>> y = reflect(x, torch.randn(64, 8))
        >>> y.dtype, torch.allclose(y.norm(dim=-1), x.norm(dim=-1), rtol=0.01)
        (torch.bfloat16, True)
    """
    _check(x, v)
    if dispatch.why_only_autograd(x, v) is not None:
        return composite.reflect(x, v, adjoint)
    return torch.ops.cwy.reflect(x, v, adjoint)[0]


def _check(x: Tensor, v: Tensor) -> None:
    """Raise unless ``x`` can be multiplied by the matrix of ``v``."""
    for name, given in (("x", x), ("v", v)):
        if not isinstance(given, Tensor):
            raise TypeError(f"reflect: {name} must be a torch.Tensor, got {type(given).__name__}.")
        check_tensor("reflect", name, given)
        if given.is_complex():
            raise TypeError(
                f"reflect: {name} must be real, got {given.dtype}. Use cwy_multiply for complex "
                "vectors."
            )
    if v.dim() not in (2, 3):
        raise ValueError(
            f"reflect: v must be (N, L), or (B, N/B, L) for blocks, got {tuple(v.shape)}."
        )
    if x.device != v.device:
        raise ValueError(f"reflect: v must be on {x.device}, as x is, got {v.device}.")
    units = v.shape[:-1].numel()
    if x.dim() == 0 or x.shape[-1] != units:
        raise ValueError(
            f"reflect: v is {tuple(v.shape)}, so x must be {('...', units)}, got "
            f"{tuple(x.shape)}. The last dimension of x holds the vectors."
        )
