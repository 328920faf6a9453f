"""The optimiser of a run: constrained and free parameters in two groups, each with its rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...parametrizations import OrthogonalMap
from ...testing import orthogonality_error
from .config import Config


def build(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """One optimiser with two groups. A method that needs an optimiser of its own gets it here."""
    constrained = {id(p): p for chain, _ in _constrained(model) for p in chain.parameters() if p.requires_grad}
    free = [p for p in model.parameters() if p.requires_grad and id(p) not in constrained]
    groups = [{"params": free, "lr": config.lr}, {"params": list(constrained.values()), "lr": config.orthogonal_lr}]
    groups = [group | {"initial_lr": group["lr"]} for group in groups if group["params"]]
    if config.optimizer == "rmsprop":
        return torch.optim.RMSprop(groups, alpha=config.alpha, foreach=True)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.SGD
    return kind(groups, foreach=True)


@torch.no_grad()
def worst_orthogonality(model: nn.Module) -> float | None:
    """The largest orthogonality error of the model's constrained weights; None if it has none."""
    return max((orthogonality_error(weight) for _, weight in _constrained(model)), default=None)


def _constrained(model: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    """Every constrained weight: its chain of parametrizations, and itself as a matrix."""
    for layer in model.modules():
        if parametrize.is_parametrized(layer):
            for name, chain in cast(nn.ModuleDict, layer.parametrizations).items():
                first = cast(nn.ModuleList, chain)[0]
                if isinstance(first, OrthogonalMap):
                    weight = getattr(layer, name)
                    yield chain, weight if first.kernel is None else weight.flatten(1)
