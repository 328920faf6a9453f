"""Find the constrained weights of a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple, cast

from torch import Tensor, nn
from torch.nn.utils import parametrize

from .._torch import originals
from .base import OrthogonalMap
from .marks import on_manifold


class Constraint(NamedTuple):
    """Describe a constrained weight of a model, as :func:`cwy.named_constraints` yields it.

    Attributes:
        module: the layer that has the weight.
        name: the name of the weight in the layer.
        map: the map that keeps the weight orthogonal.
        free: the free parameters from which the weight is computed. A weight that lives on the
            manifold (methods "rgd-…") is its own free parameter.
    """

    module: nn.Module
    name: str
    map: OrthogonalMap
    free: tuple[Tensor, ...]


_changes = itertools.count()
_generation = next(_changes)


def generation() -> int:
    """Return a number that changes when a weight of any model is constrained or baked."""
    return _generation


def note_change() -> None:
    """Make :func:`generation` return another number."""
    global _generation
    _generation = next(_changes)


def named_constraints(model: nn.Module) -> Iterator[Constraint]:
    """Yield each weight of a model that a map of this library constrains.

    Args:
        model: a module. The layers within it are searched too.

    Yields:
        A named tuple ``(module, name, map, free)`` for each constrained weight.
        ``getattr(module, name)`` computes the weight.

    Example:
        >>> model = torch.nn.Sequential(
        ...     orthogonal(torch.nn.Linear(6, 6), reflections=4),
        ...     torch.nn.ReLU(),
        ...     orthogonal(torch.nn.Linear(6, 3), method="rgd-c-c"),
        ... )
        >>> for constraint in named_constraints(model):
        ...     print(constraint.name, constraint.map, [tuple(p.shape) for p in constraint.free])
        weight CWY(n=6, m=6, reflections=4) [(6, 4)]
        weight RGD(n=6, m=3, metric='canonical', retraction='cayley', momentum=0.0) [(3, 6)]
    """
    for layer in model.modules():
        for name, chart in on_manifold(layer).items():
            yield Constraint(layer, name, chart, (getattr(layer, name),))
        if not parametrize.is_parametrized(layer):
            continue
        for name, chain in cast(nn.ModuleDict, layer.parametrizations).items():
            chart = _first_map(chain)
            if chart is not None:
                free = originals(cast(parametrize.ParametrizationList, chain))
                yield Constraint(layer, name, chart, free)


def _first_map(chain: nn.Module) -> OrthogonalMap | None:
    """Return the first map of this library among the parametrizations of a weight."""
    for part in cast(nn.ModuleList, chain):
        if isinstance(part, OrthogonalMap):
            return part
    return None
