"""The optimiser of a run: constrained and free parameters, each with its rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...optim import for_model
from ...parametrizations import OrthogonalMap
from ...parametrizations.rgd import on_manifold
from ...testing import orthogonality_error
from .config import Config


def build(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Free parameters at ``lr``, constrained ones at ``orthogonal_lr``; weights on the manifold get its own optimiser."""
    on_gpu = next(model.parameters()).is_cuda
    # One pass over all that Adam remembers, where it is there: for real parameters.
    fused = on_gpu and config.optimizer == "adam" and all(p.is_floating_point() for p in model.parameters())
    options: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
    if config.optimizer != "sgd":
        options["capturable"] = on_gpu
    if config.optimizer == "rmsprop":
        options["alpha"] = config.alpha
    kind = {"rmsprop": torch.optim.RMSprop, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[config.optimizer]
    optimizer = for_model(model, config.lr, config.orthogonal_lr, kind, **options)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


def load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Reads a state dict, perhaps of another device: what is remembered is its, how a step is computed is this device's."""
    for theirs, ours in zip(state["param_groups"], optimizer.param_groups, strict=True):
        theirs |= {key: ours[key] for key in ("foreach", "fused", "capturable") if key in ours}
    optimizer.load_state_dict(state)


@torch.no_grad()
def worst_orthogonality(model: nn.Module) -> float | None:
    """The largest orthogonality error of the model's constrained weights; None if it has none."""
    return max(map(orthogonality_error, constrained(model)), default=None)


def constrained(model: nn.Module) -> Iterator[Tensor]:
    """Every constrained weight as a matrix."""
    for layer in model.modules():
        charts: dict[str, nn.Module] = dict(on_manifold(layer))
        if parametrize.is_parametrized(layer):
            for name, chain in cast(nn.ModuleDict, layer.parametrizations).items():
                charts[name] = cast(nn.ModuleList, chain)[0]
        for name, chart in charts.items():
            if isinstance(chart, OrthogonalMap):
                weight = getattr(layer, name)
                yield weight if chart.kernel is None else weight.flatten(1)
