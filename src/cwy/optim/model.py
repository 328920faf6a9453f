"""The right optimiser for a model with any mix of methods."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from ..parametrizations import OrthogonalMap
from ..parametrizations.rgd import on_manifold
from .adam import StiefelAdam
from .joint import Joint
from .sgd import StiefelSGD

RULES = {"sgd": StiefelSGD, "adam": StiefelAdam}


def for_model(
    model: nn.Module,
    lr: float | Tensor = 1e-3,
    orthogonal_lr: float | Tensor | None = None,
    optimizer: Callable[..., Optimizer] = torch.optim.Adam,
    *,
    project: bool = False,
    **options: Any,
) -> Optimizer:
    """The optimiser that every parameter of a model needs, as one object.

    Free parameters, and those from which :func:`cwy.orthogonal` computes a weight, go to ``optimizer``; weights that live on
    the manifold (methods ``rgd-…``) to :class:`StiefelSGD` or :class:`StiefelAdam`, as their method says.

    Args:
        model: a module, its layers constrained already.
        lr: the rate of free parameters.
        orthogonal_lr: the rate of all that is constrained; ``lr`` by default.
        optimizer: a class of ``torch.optim``, or what makes such an optimiser of groups and options.
        project: moves weights that should be on the manifold, and are not, back to it; by default they are refused.
        options: for ``optimizer``, e.g. ``weight_decay``; ``maximize`` holds for all parameters.

    Returns:
        An ``optimizer`` if nothing lives on the manifold, else a :class:`Joint` or the one part that is needed. Its groups are
        named "free", "orthogonal" and "manifold".

    Example:
        >>> layers = [orthogonal(torch.nn.Linear(4, 4), method=method) for method in ("cwy", "rgd-c-c")]
        >>> optimizer = for_model(torch.nn.Sequential(*layers), lr=1e-3, orthogonal_lr=1e-2)
        >>> [(group["name"], group["lr"]) for group in optimizer.param_groups]
        [('free', 0.001), ('orthogonal', 0.01), ('manifold', 0.01)]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"for_model: expected a torch.nn.Module, got {type(model).__name__}.")
    orthogonal_lr = lr if orthogonal_lr is None else orthogonal_lr
    computed, maps = _constrained(model)
    named: dict[str, list[tuple[str, Tensor]]] = {"free": [], "orthogonal": []}
    moved: dict[tuple, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, p in model.named_parameters():
        if p in maps:
            chart = maps[p]
            moved[chart.rule, chart.kernel is not None, tuple(chart.settings.items())].append((name, p))
        else:
            named["orthogonal" if p in computed else "free"].append((name, p))
    rates = {"free": lr, "orthogonal": orthogonal_lr}
    groups = [{"params": ps, "lr": rates[name], "name": name} for name, ps in named.items() if ps]
    parts = [optimizer(groups, lr=lr, **options)] if groups else []
    by_rule: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for (rule, kernel, settings), ps in moved.items():
        by_rule[rule].append({"params": ps, "name": "manifold", "kernel": kernel, **dict(settings)})
    more = {"project": project, "maximize": options.get("maximize", False)}
    parts += [RULES[rule](theirs, lr=orthogonal_lr, **more) for rule, theirs in by_rule.items()]
    if not parts:
        raise ValueError(f"for_model: {type(model).__name__} has no parameters.")
    return parts[0] if len(parts) == 1 else Joint(parts)


def _constrained(model: nn.Module) -> tuple[set[Tensor], dict]:
    """The parameters from which weights are computed, and the maps of those that live on the manifold."""
    computed, maps = set(), {}
    for layer in model.modules():
        maps |= {getattr(layer, name): chart for name, chart in on_manifold(layer).items()}
        if parametrize.is_parametrized(layer):
            for chain in cast(nn.ModuleDict, layer.parametrizations).values():
                if any(isinstance(part, OrthogonalMap) for part in cast(Iterable, chain)):
                    computed.update(chain.parameters())
    return computed, maps
