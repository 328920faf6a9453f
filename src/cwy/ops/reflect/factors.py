r"""The factors of $Q = I + R\,L^\top$ in the dtype of the activations, and their gradient.

The notation is that of README.md: R (``right``) holds the rounded columns, and L (``left``) is
$-U T^\top D^{-1}$ with U and T from the rounded columns and D their norms. The sign is in a factor,
so that no product with it takes one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from .._linalg import add_product_, minus_product
from .._precision import in_full_precision

# Half precision holds the factors if a block has at least so many units per reflection. With fewer
# units the rounding of the factors shows in y. tests/ops/test_reflect.py measures it.
UNITS_PER_REFLECTION = 8

HALF = (torch.float16, torch.bfloat16)


class Factors(NamedTuple):
    """Hold the two factors of a matrix.

    Attributes:
        left: ``(*, N, L)``.
        right: ``(*, N, L)``.
    """

    left: Tensor
    right: Tensor


class Kept(NamedTuple):
    """Hold what the gradient of the vectors takes.

    Attributes:
        t: ``(*, L, L)``.
        reciprocal: ``(*, 1, L)``, the reciprocal norms of the vectors, or of the rounded ones.
        scale: ``(*, 1, L)``, the reciprocal norms of the columns of ``right``.
    """

    t: Tensor
    reciprocal: Tensor
    scale: Tensor


def working_dtype(v: Tensor, x: torch.dtype) -> torch.dtype:
    """Return the dtype that factors are computed in: float32, or float64 if v or x has it."""
    if torch.float64 in (v.dtype, x):
        return torch.float64
    return torch.float32


def factor_dtype(v: Tensor, x: torch.dtype) -> torch.dtype:
    """Return the dtype of the factors for activations of dtype x."""
    if x in HALF and v.shape[-2] < UNITS_PER_REFLECTION * v.shape[-1]:
        return torch.float32
    return x


@in_full_precision
def form(v: Tensor, dtype: torch.dtype) -> tuple[Factors, Kept]:
    """Compute the factors of ``v (*, N, L)``, float32 or float64, rounded to a dtype."""
    backend = dispatch.choose("wy", "auto", v)
    if dtype == torch.bfloat16 and v.dtype == torch.float32:
        # It has the range of float32, so the vectors need not be normalized first.
        # The kernels read what lies in memory, so a parameter may not hand on its strides.
        right = v.to(dtype, memory_format=torch.contiguous_format)
        u, t, scale = backend.forward_factors(right.to(v.dtype))
        return Factors(_left(u, t, scale, dtype), right), Kept(t, scale, scale)
    u, t, reciprocal = backend.forward_factors(v)
    if dtype == v.dtype:
        scale = torch.ones_like(reciprocal)
        return Factors(minus_product(u, t.mT, u), u), Kept(t, reciprocal, scale)
    right = u.to(dtype)
    u, t, scale = backend.forward_factors(right.to(v.dtype))
    return Factors(_left(u, t, scale, dtype), right), Kept(t, reciprocal, scale)


def _left(u: Tensor, t: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the left factor, rounded to a dtype."""
    left = torch.empty_like(u, dtype=dtype)
    return torch.mul(minus_product(u, t.mT, u), scale, out=left)


@in_full_precision
def pull_back(right: Tensor, kept: Kept, d_left: Tensor | None, d_right: Tensor | None) -> Tensor:
    """Compute the gradient of the vectors from those of the factors. None is zero."""
    # The scale is as wide as the result, so a product with it widens the other tensor too.
    u = right * kept.scale
    du = None
    dt = None
    if d_right is not None:
        # The scale of a zero column is 0, and its gradient is zero.
        du = d_right / kept.scale.clamp(min=torch.finfo(u.dtype).tiny)
    if d_left is not None:
        d_left = d_left * kept.scale
        if du is None:
            du = minus_product(d_left, kept.t, u)
        else:
            add_product_(du, d_left, kept.t, alpha=-1)
        dt = minus_product(d_left.mT, u, kept.t)
    backend = dispatch.choose("wy", "auto", u)
    return backend.backward_factors(u, kept.t, kept.reciprocal, du, dt)
