"""The op in ATen operations, for ``torch.func``, forward-mode AD and second derivatives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..wy.wy import cwy_multiply
from .factors import working_dtype


def reflect(x: Tensor, v: Tensor, adjoint: bool) -> Tensor:
    """Return the vectors of x mapped by Q or its adjoint, computed in float32 or float64."""
    dtype = working_dtype(v, x.dtype)
    work = v.to(dtype)
    rows = x.to(dtype)
    if v.dim() == 2:
        return cwy_multiply(work, rows, adjoint, backend="composite").to(x.dtype)
    parts = [
        cwy_multiply(block, part, adjoint, backend="composite")
        for block, part in zip(work, rows.chunk(v.shape[0], -1), strict=True)
    ]
    return torch.cat(parts, -1).to(x.dtype)


def gradients(
    gy: Tensor, x: Tensor, v: Tensor, adjoint: bool, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and v so that they can be differentiated again."""
    asked = [one for one, needed in zip((x, v), needs, strict=True) if needed]
    found = iter(torch.autograd.grad(reflect(x, v, adjoint), asked, gy, create_graph=True))
    dx = None
    dv = None
    if needs[0]:
        dx = next(found)
    if needs[1]:
        dv = next(found)
    return dx, dv
