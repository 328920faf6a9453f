"""The library's own methods as entries: they follow from the registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...parametrizations import METHODS, OrthogonalMap
from ...registry import Method
from ..harness.entry import Case, gaussian


def serving(n: int, m: int) -> dict[str, Method]:
    """Return the methods that make N x M matrices of free parameters."""
    unfit = "square"
    if n == m:
        unfit = "tall"
    return {
        name: method
        for name, method in METHODS.items()
        if method.kind != unfit and not method.on_manifold
    }


def takes(method: Method, option: str) -> bool:
    """Return whether a method has such an option."""
    return option in inspect.signature(method.build).parameters


def counted(method: Method, count: int) -> dict[str, int]:
    """Return the options that limit a method to a number of reflections or layers."""
    return {option: count for option in ("reflections", "layers") if takes(method, option)}


def listed(options: Mapping[str, Any]) -> str:
    """Write options as they continue a call: ", reflections=4"."""
    return "".join(f", {key}={value}" for key, value in options.items())


def multiplies_without_q(method: Method) -> bool:
    """Return whether a method multiplies vectors without forming Q."""
    return method.build._times is not OrthogonalMap._times


def weight_dtype(
    method: Method, n: int, m: int, dtype: torch.dtype, **options
) -> torch.dtype | None:
    """Return the dtype of the weight that a method makes.

    It is complex where the method serves no other, and None if the method refuses these options.
    """
    tried = [dtype]
    if method.complex:
        tried.append(dtype.to_complex())
    for one in tried:
        try:
            method.build(n, m, dtype=one, **options)
        except (TypeError, ValueError):
            continue
        return one
    return None


@dataclass(frozen=True)
class Usage:
    """Describe how a method is timed.

    Attributes:
        method: of the registry.
        n: the rows of the weight.
        m: the columns of the weight.
        use: what of the map is timed, e.g. its ``multiply``.
        measure: the orthogonality error of the result, None if that is not orthogonal.
        options: of the method.
    """

    method: Method
    n: int
    m: int
    use: Callable[[OrthogonalMap], Callable[..., Tensor]]
    measure: Callable[[Tensor], float] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def case(self, dtype: torch.dtype, device: torch.device, *more: Tensor) -> Case:
        """Make a case at the method's own sample. ``more`` are inputs after the parameters."""
        chart = self._build(dtype, device)
        inputs = (*free_parameters(chart), *more)
        # Built again, not converted: a complex map may have real parameters and buffers.
        exact = self._build(torch.promote_types(dtype, torch.float64), device)
        exact.load_state_dict(chart.state_dict())
        return Case(self.use(chart), inputs, self.use(exact), self.measure)

    def _build(self, dtype: torch.dtype, device: torch.device) -> OrthogonalMap:
        return self.method.build(self.n, self.m, dtype=dtype, device=device, **self.options)


def free_parameters(chart: OrthogonalMap) -> tuple[Tensor, ...]:
    """Draw a sample, and move it by a small Gaussian step.

    Some methods start at a point where they are cheaper than ever after.
    """
    sample = chart.sample()
    if isinstance(sample, Tensor):
        sample = (sample,)
    std = 0.5 * chart.n**-0.5
    return tuple(x + gaussian(*x.shape, std=std, dtype=x.dtype, device=x.device) for x in sample)
