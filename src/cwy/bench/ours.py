"""Entries of the library's own methods: they follow from the registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from ..parametrizations import METHODS, OrthogonalMap
from ..registry import Method
from .entry import Case, gaussian, wide


def serving(n: int, m: int) -> dict[str, Method]:
    """The methods that make N x M matrices of free parameters."""
    unfit = "tall" if n == m else "square"
    return {name: method for name, method in METHODS.items() if method.kind != unfit and not method.on_manifold}


def takes(method: Method, option: str) -> bool:
    """Whether a method has such an option."""
    return option in inspect.signature(method.build).parameters


def multiplies_unformed(method: Method) -> bool:
    """Whether a method multiplies vectors without forming Q."""
    return method.build._times is not OrthogonalMap._times


def weight_dtype(method: Method, n: int, m: int, dtype: torch.dtype, **options) -> torch.dtype | None:
    """The dtype of the weight that a method makes: complex where it serves no other, None if it refuses these options."""
    for one in (dtype, dtype.to_complex()) if method.complex else (dtype,):
        try:
            method.build(n, m, dtype=one, **options)
        except (TypeError, ValueError):
            continue
        return one
    return None


def free_parameters(chart: OrthogonalMap) -> tuple[Tensor, ...]:
    """A sample, moved by a small Gaussian step: some methods start at a point where they are cheaper than ever after."""
    free = chart.sample()
    std = 0.5 * chart.n**-0.5
    return tuple(
        x + gaussian(*x.shape, std=std, dtype=x.dtype, device=x.device) for x in (free if isinstance(free, tuple) else (free,))
    )


def case(
    method: Method,
    n: int,
    m: int,
    use: Callable[[OrthogonalMap], Callable[..., Tensor]],
    measure: Callable[[Tensor], float] | None,
    dtype: torch.dtype,
    device: torch.device,
    *more: Tensor,
    **options,
) -> Case:
    """A case of a method, at its own sample.

    Args:
        use: what of the map is timed, e.g. its ``multiply``.
        measure: the orthogonality error of the result; None if that is not orthogonal.
        more: inputs beside the free parameters.
    """
    chart = method.build(n, m, dtype=dtype, device=device, **options)
    inputs = *free_parameters(chart), *more
    # Made anew, not converted: a complex map may have real parameters and buffers.
    double = method.build(n, m, dtype=wide(dtype), device=device, **options)
    double.load_state_dict(chart.state_dict())
    return Case(use(chart), inputs, use(double), measure)
