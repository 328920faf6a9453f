"""Reflection vectors: their start, their orthonormal form, and the matrices that they stand for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..ops import reflect
from ..ops._linalg import widen

LENGTH = math.sqrt(8)
"""The norm of new vectors, by which a step of Adam moves a weight as far as a step of LoRA does."""
DEPENDENT = 1e-5
"""A vector with a smaller part outside the span of those before it is dependent."""


def paired_vectors(features: int, r: int, blocks: int | None, paired: bool) -> Tensor:
    """Draw vectors ``(N, r)``, or ``(B, N/B, r)``, in equal pairs or independent."""
    batch = ()
    if blocks is not None:
        batch = (blocks,)
        features = features // blocks
    count = r
    if paired:
        count = r // 2
    v = torch.randn(*batch, features, count)
    v = v * (LENGTH / torch.linalg.vector_norm(v, dim=-2, keepdim=True))
    if paired:
        return v.repeat_interleave(2, dim=-1)
    return v


def orthonormal(v: Tensor) -> Tensor:
    """Return the vectors of ``v (*, N, r)`` by Gram and Schmidt, zero for dependent ones.

    PEFT calls this ``apply_GS``. It is computed in float64, where the device has it.
    """
    wide = widen(v)
    columns: list[Tensor] = []
    for one in wide.split(1, dim=-1):
        rest = one
        if columns:
            before = torch.cat(columns, -1)
            rest = one - before @ (before.mT @ one)
        norm = torch.linalg.vector_norm(rest.detach(), dim=-2, keepdim=True)
        length = torch.linalg.vector_norm(one.detach(), dim=-2, keepdim=True)
        independent = norm > DEPENDENT * length
        # A dependent vector has no direction of its own. Its gradient would not be finite.
        safe = torch.where(independent, rest, 1)
        unit = safe / torch.linalg.vector_norm(safe, dim=-2, keepdim=True)
        columns.append(torch.where(independent, unit, 0))
    return torch.cat(columns, -1).to(v.dtype)


def times_matrix(weight: Tensor, v: Tensor, adjoint: bool = False) -> Tensor:
    """Return ``weight @ Q``, or ``weight @ Q.mT``, for a matrix of any number of rows."""
    return reflect(weight, v, adjoint=not adjoint)


def matrix_times(v: Tensor, weight: Tensor, adjoint: bool = False) -> Tensor:
    """Return ``Q @ weight``, or ``Q.mT @ weight``."""
    return reflect(weight.mT, v, adjoint=adjoint).mT
