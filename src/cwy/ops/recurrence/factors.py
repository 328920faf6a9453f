r"""The transition from factors, $Q = (I - U T U^H)\,\mathrm{diag}(s)$: formed, or in low-rank form.

The backward pass is a few products, where autograd has a node for each operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Function

from .. import dispatch
from .._linalg import multiply, widen_if_cheap
from .._precision import in_full_precision
from ..dispatch import why_only_aten
from ..wy import WY, wy_factors
from .spec import Request, computed_in
from .transition import Formed, LowRank, Transition


@dataclass(frozen=True)
class Reflections:
    """Hold a transition by reflections that is not computed yet.

    Attributes:
        v: ``(N, L)``, the reflection vectors.
        signs: returns the signs ``(N,)``.
        matrix: returns Q.
    """

    v: Tensor
    signs: Callable[[], Tensor]
    matrix: Callable[[], Tensor]


def factors_are_cheaper(
    n: int, reflections: int, rows: int, device: str, dtype: torch.dtype, index: int | None = None
) -> bool:
    """Return whether a training step of ``rows`` states is cheaper in low-rank form.

    The backend that serves such a recurrence decides.
    """
    # cuDNN, which takes only a formed Q, has no "abs" and so is not asked.
    compiling = torch.compiler.is_compiling()
    request = Request(n, 1, 1, dtype, device, "abs", index=index, compiling=compiling)
    backend = dispatch.choose("rollout", "auto", request)
    return backend.prefers_low_rank(n, reflections, rows)


def takes_low_rank(transition: Tensor | WY | Reflections, rows: int, dtype: torch.dtype) -> bool:
    """Return whether low-rank form is the cheaper one, for ``rows`` states in all."""
    if isinstance(transition, Tensor):
        return False
    first = first_tensor(transition)
    n, reflections = first.shape
    return factors_are_cheaper(n, reflections, rows, first.device.type, dtype, first.device.index)


def decide(
    transition: Tensor | WY | Reflections,
    signs: Tensor | None,
    dtype: torch.dtype,
    *,
    low_rank: bool,
) -> Transition:
    """Return the transition in the form that :func:`takes_low_rank` chose."""
    if isinstance(transition, Tensor):
        return Formed(transition.to(dtype))
    if isinstance(transition, Reflections):
        # Rounded to half precision, Q would lose the norm of its states. The factors are float32.
        is_wide = computed_in(transition.v.dtype) == transition.v.dtype
        if is_wide and not low_rank:
            return Formed(transition.matrix().to(dtype))
        signs = transition.signs()
        transition = wy_factors(transition.v)
    u = transition.u.to(dtype)
    t = transition.t.to(dtype)
    if signs is not None:
        signs = signs.to(dtype)
    if low_rank:
        return in_low_rank(u, t, signs)
    return Formed(form(u, t, signs))


def first_tensor(transition: Tensor | WY | Reflections) -> Tensor:
    """Return the tensor of a transition that has its rows."""
    if isinstance(transition, WY):
        return transition.u
    if isinstance(transition, Reflections):
        return transition.v
    return transition


def in_low_rank(u: Tensor, t: Tensor, signs: Tensor | None) -> LowRank:
    r"""Return $W = UT$, $Y = \mathrm{diag}(\bar s)\,U$ and $d = s$, or ones."""
    if _by_hand(u, t, signs):
        w, y = _LowRank.apply(u, t, signs)
    else:
        w = _product(u, t)
        y = _scale(u, signs)
    if signs is None:
        signs = torch.ones(u.shape[0], dtype=u.dtype, device=u.device)
    return LowRank(w, y, signs)


def form(u: Tensor, t: Tensor, signs: Tensor | None) -> Tensor:
    """Return Q, rounded once, because every step of a loop repeats its error."""
    if _by_hand(u, t, signs):
        return _Formed.apply(u, t, signs)
    wide = widen_if_cheap(u)
    if signs is None:
        d = wide.new_ones(u.shape[0])
    else:
        d = signs.to(wide.dtype)
    product = _product(_product(wide, t.to(wide.dtype)), _scale(wide, signs).mH)
    return (torch.diag(d) - product).to(u.dtype)


_product = in_full_precision(multiply)


def _by_hand(u: Tensor, t: Tensor, signs: Tensor | None) -> bool:
    """Return whether the backward pass below serves."""
    if signs is not None and signs.requires_grad:
        return False
    return why_only_aten(u, t, signs) is None


def _scale(u: Tensor, signs: Tensor | None) -> Tensor:
    if signs is None:
        return u
    return u * signs.conj().unsqueeze(-1)


class _LowRank(Function):
    """Compute W and Y from U, T and the signs."""

    @staticmethod
    @in_full_precision
    def forward(ctx, u, t, signs):
        ctx.save_for_backward(u, t, signs)
        if signs is None:
            return u @ t, u.detach()
        return u @ t, _scale(u, signs)

    @staticmethod
    def backward(ctx, dw, dy):
        u, t, signs = ctx.saved_tensors
        return *_low_rank_gradient(dw, dy, u, t, signs), None


class _Formed(Function):
    """Form Q from U, T and the signs."""

    @staticmethod
    @in_full_precision
    def forward(ctx, u, t, signs):
        ctx.save_for_backward(u, t, signs)
        wide = widen_if_cheap(u)
        q = -((wide @ t.to(wide.dtype)) @ _scale(wide, signs).mH)
        if signs is None:
            q.diagonal().add_(1)
        else:
            q.diagonal().add_(signs)
        return q.to(u.dtype)

    @staticmethod
    def backward(ctx, dq):
        u, t, signs = ctx.saved_tensors
        return *_formed_gradient(dq, u, t, signs), None


@in_full_precision
def _low_rank_gradient(dw, dy, u, t, signs):
    if signs is not None:
        dy = dy * signs.unsqueeze(-1)
    if torch.is_grad_enabled():
        return dy + multiply(dw, t.mH), multiply(u.mH, dw)
    return torch.addmm(dy, dw, t.mH), u.mH @ dw


@in_full_precision
def _formed_gradient(dq, u, t, signs):
    times = torch.matmul
    if torch.is_grad_enabled():
        times = multiply
    dq = -dq
    dw = times(dq, _scale(u, signs))
    dy = times(dq.mH, times(u, t))
    return _low_rank_gradient(dw, dy, u, t, signs)
