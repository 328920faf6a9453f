"""The definition: one reflection after the other, in plain torch."""

import torch
from torch import Tensor


def reflect(x: Tensor, v: Tensor, adjoint: bool = False) -> Tensor:
    r"""Compute $H(v_1)\cdots H(v_L) x$ for each vector of x, or its adjoint.

    Args:
        x: ``(..., N)``.
        v: ``(N, L)``, or ``(B, N/B, L)`` for a block-diagonal matrix.
        adjoint: multiply by the adjoint.
    """
    if v.dim() == 3:
        parts = x.chunk(v.shape[0], -1)
        mapped = [reflect(part, block, adjoint) for part, block in zip(parts, v, strict=True)]
        return torch.cat(mapped, -1)
    vectors = list(v.unbind(-1))
    if not adjoint:
        vectors.reverse()
    for one in vectors:
        x = x - 2 * (x @ one).unsqueeze(-1) * one / one.dot(one)
    return x
