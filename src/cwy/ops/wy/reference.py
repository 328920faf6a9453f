"""The definition: one reflection after the other, in plain torch."""

import torch
from torch import Tensor

from .._precision import in_full_precision
from .composite import normalize, sign_columns


@in_full_precision
def reflect(v: Tensor, x: Tensor, adjoint: bool = False) -> Tensor:
    r"""Compute $H(v_1)\cdots H(v_L) X$ with $H(v) = I - 2vv^H/\lVert v\rVert^2$, or its adjoint.

    Args:
        v: ``(*, N, L)``, the vectors as columns.
        x: ``(*, N, K)``.
        adjoint: multiply by the adjoint, in which the order is reversed.
    """
    u, _ = normalize(v)
    columns = list(range(u.shape[-1]))
    if not adjoint:
        columns.reverse()
    for i in columns:
        ui = u[..., i : i + 1]
        x = x - 2 * ui * (ui.conj() * x).sum(-2, keepdim=True)
    return x


def _first_columns(v: Tensor, m: int) -> Tensor:
    return torch.eye(v.shape[-2], m, dtype=v.dtype, device=v.device).expand(*v.shape[:-2], -1, -1)


def cwy_matrix(v: Tensor, signs: Tensor | None = None) -> Tensor:
    return sign_columns(reflect(v, _first_columns(v, v.shape[-2])), signs)


def tcwy_matrix(v: Tensor, signs: Tensor | None = None) -> Tensor:
    return sign_columns(reflect(v, _first_columns(v, v.shape[-1])), signs)


def cwy_multiply(v: Tensor, x: Tensor, adjoint: bool) -> Tensor:
    return reflect(v, x.mT, adjoint).mT


@in_full_precision
def wy_factors(v: Tensor) -> tuple[Tensor, Tensor]:
    """Return U and T, which grows by a column per reflection, as in the proof of Theorem 2."""
    u, _ = normalize(v)
    t = u.new_zeros(*u.shape[:-2], 0, 0)
    for k in range(u.shape[-1]):
        uk = u[..., k : k + 1]
        above = -2 * t @ (u[..., :k].mH @ uk)
        last = torch.full_like(uk[..., :1, :], 2)
        column = torch.cat([above, last], -2)
        t = torch.cat([torch.nn.functional.pad(t, (0, 0, 0, 1)), column], -1)
    return u, t
