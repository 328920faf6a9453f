"""Hold the length of free parameters whose direction is all that counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._torch import foreach_clamp_max_, foreach_clamp_min_, foreach_div, foreach_mul_
from ..api import named_constraints
from ..parametrizations import OWN, URNN, OrthogonalMap
from ..parametrizations.reflections import ReflectionMap

# A length of zero would make the ratio infinite, and 0 times infinity is NaN.
_LARGEST_RATIO = 1e30


@dataclass(frozen=True, eq=False)
class Directions:
    """Describe a free parameter of which a positive factor per vector changes nothing.

    Attributes:
        parameter: the free parameter.
        dims: the dimensions along which one vector lies. An empty tuple means that each entry is a
            vector.
    """

    parameter: Tensor
    dims: tuple[int, ...]

    def view(self) -> Tensor:
        """Return the parameter with one dimension per vector at least."""
        if self.dims:
            return self.parameter
        return self.parameter.unsqueeze(-1)

    def lengths(self) -> Tensor:
        """Compute the length of each vector in float64.

        Squares of float32 numbers neither overflow nor underflow there.
        """
        view = self.view()
        dims = self.dims or (-1,)
        wide = torch.promote_types(view.dtype, torch.float64)
        return torch.linalg.vector_norm(view, dim=dims, keepdim=True, dtype=wide)


def directions(model: nn.Module) -> Iterator[Directions]:
    """Yield the free parameters of a model whose length has no effect on the weight."""
    for constraint in named_constraints(model):
        yield from _of_map(constraint.map, constraint.free)


def _of_map(chart: OrthogonalMap, free: tuple[Tensor, ...]) -> Iterator[Directions]:
    if isinstance(chart, ReflectionMap):
        vectors, *phases = free
        yield Directions(vectors, dims=(-2,))
        for phase in phases:
            yield Directions(phase, dims=())
    elif isinstance(chart, URNN):
        _, vectors = free
        yield Directions(vectors, dims=(-1,))
    elif isinstance(chart, OWN):
        (matrix,) = free
        yield Directions(matrix, dims=(-2, -1))


def hold_length(optimizer: Optimizer, model: nn.Module) -> None:
    r"""Hold the length of a model's reflection vectors while an optimizer trains them.

    Q depends only on the direction of a vector v, but the length of v sets how far a step turns it:
    the gradient is proportional to $1/\lVert v\rVert$. Plain steps lengthen v, so that training
    slows down. Weight decay shortens v, so that training never settles. After each step, this
    function scales every vector back to the length that it had before the step. Q stays as it is.
    The lengths of an assigned or loaded weight are the ones held from then on.

    It serves "cwy", "tcwy", "hr", "urnn" and "own". Other methods have no such length.

    Args:
        optimizer: any optimizer of ``torch.optim`` or :mod:`cwy.optim`. A decay at which
            ``lr * weight_decay`` reaches 1 replaces the vector, which no scaling corrects. Like all
            hooks, these are absent from a copied optimizer.
        model: the module whose weights the optimizer trains.

    Example:
        >>> layer = orthogonal(torch.nn.Linear(4, 4))
        >>> optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=1.0)
        >>> hold_length(optimizer, layer)
        >>> v = layer.parametrizations.weight.original
        >>> before = v.norm(dim=0).detach()
        >>> layer(torch.ones(4)).sum().backward()
        >>> optimizer.step()
        >>> torch.allclose(v.norm(dim=0), before)
        True
    """
    held = list(directions(model))
    if not held:
        return
    before: list[Tensor] = []

    @torch.no_grad()
    def measure(*_) -> None:
        before[:] = [vectors.lengths() for vectors in held]

    @torch.no_grad()
    def scale(*_) -> None:
        after = [vectors.lengths() for vectors in held]
        foreach_clamp_min_(after, torch.finfo(torch.float64).tiny)
        ratios = foreach_div(before, after)
        foreach_clamp_max_(ratios, _LARGEST_RATIO)
        ratios = [
            _fitting(ratio, vectors.parameter) for ratio, vectors in zip(ratios, held, strict=True)
        ]
        foreach_mul_([vectors.view() for vectors in held], ratios)
        before.clear()

    optimizer.register_step_pre_hook(measure)
    optimizer.register_step_post_hook(scale)


def _fitting(ratio: Tensor, parameter: Tensor) -> Tensor:
    """Round a ratio to the precision of the parameter, but to no less than float32."""
    if parameter.dtype in (torch.float64, torch.complex128):
        return ratio
    return ratio.float()
