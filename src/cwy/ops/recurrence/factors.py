r"""From the factors of $Q = (I - U T U^H)\,\mathrm{diag}(d)$ to what the loop takes: Q itself, or W and Y.

The backward is written by hand: a few products, where autograd would have a node for each operation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function

from .._linalg import widen_if_cheap
from .._precision import in_full_precision
from ..dispatch import why_only_aten
from ..skew import multiply


def split(u: Tensor, t: Tensor, signs: Tensor | None) -> tuple[Tensor, Tensor]:
    r"""$W = UT$ and $Y = \mathrm{diag}(\bar d)\,U$, with ``signs`` d, or ones."""
    if _by_hand(u, t, signs):
        return _Split.apply(u, t, signs)
    return _product(u, t), _scaled(u, signs)


def formed(u: Tensor, t: Tensor, signs: Tensor | None) -> Tensor:
    """Q. Every step of a loop repeats what it is off by: it is rounded once, not three times."""
    if _by_hand(u, t, signs):
        return _Formed.apply(u, t, signs)
    wide = widen_if_cheap(u)
    d = wide.new_ones(u.shape[0]) if signs is None else signs.to(wide.dtype)
    return (torch.diag(d) - _product(_product(wide, t.to(wide.dtype)), _scaled(wide, signs).mH)).to(
        u.dtype
    )


_product = in_full_precision(multiply)


def _by_hand(u: Tensor, t: Tensor, signs: Tensor | None) -> bool:
    return why_only_aten(u, t, signs) is None and (signs is None or not signs.requires_grad)


def _scaled(u: Tensor, signs: Tensor | None) -> Tensor:
    return u if signs is None else u * signs.conj().unsqueeze(-1)


class _Split(Function):
    @staticmethod
    @in_full_precision
    def forward(ctx, u, t, signs):
        ctx.save_for_backward(u, t, signs)
        return u @ t, u.detach() if signs is None else _scaled(u, signs)

    @staticmethod
    def backward(ctx, gw, gy):
        return *_gradient(gw, gy, *ctx.saved_tensors), None


class _Formed(Function):
    @staticmethod
    @in_full_precision
    def forward(ctx, u, t, signs):
        ctx.save_for_backward(u, t, signs)
        wide = widen_if_cheap(u)
        q = -((wide @ t.to(wide.dtype)) @ _scaled(wide, signs).mH)
        q.diagonal().add_(1 if signs is None else signs)
        return q.to(u.dtype)

    @staticmethod
    def backward(ctx, z):
        u, t, signs = ctx.saved_tensors
        return *_formed_gradient(z, u, t, signs), None


@in_full_precision
def _gradient(gw, gy, u, t, signs):
    gy = gy if signs is None else gy * signs.unsqueeze(-1)
    if torch.is_grad_enabled():
        return gy + multiply(gw, t.mH), multiply(u.mH, gw)
    return torch.addmm(gy, gw, t.mH), u.mH @ gw


@in_full_precision
def _formed_gradient(z, u, t, signs):
    z, times = -z, multiply if torch.is_grad_enabled() else torch.matmul
    return _gradient(times(z, _scaled(u, signs)), times(z.mH, times(u, t)), u, t, signs)
