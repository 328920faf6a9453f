"""The right optimiser for a model with any mix of methods."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from ..parametrizations import OrthogonalMap
from ..parametrizations.rgd import on_manifold
from .adam import StiefelAdam
from .hold import directions
from .hold import hold_length as hold_lengths
from .joint import Joint
from .sgd import StiefelSGD

RULES = {"sgd": StiefelSGD, "adam": StiefelAdam}

_P = ParamSpec("_P")


def _rates_first(call: Callable[_P, Optimizer]) -> Callable[_P, Optimizer]:
    """Raise an error that names the mistake where an optimizer stands in the place of a learning rate."""

    @functools.wraps(call)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> Optimizer:
        # Python itself would raise that lr was given twice, before the body could look.
        given = dict(zip(("lr", "orthogonal_lr"), args[1:], strict=False))
        for name in ("lr", "orthogonal_lr"):
            rate = given.get(name, kwargs.get(name))
            if callable(rate) and not isinstance(rate, Tensor):
                kind = getattr(rate, "__name__", type(rate).__name__)
                raise TypeError(
                    f"for_model: {name} must be a number or a tensor, got {kind}. An optimizer goes by its name: "
                    f"for_model(model, lr=1e-3, optimizer={kind})."
                )
        return call(*args, **kwargs)

    return checked


@_rates_first
def for_model(
    model: nn.Module,
    lr: float | Tensor = 1e-3,
    orthogonal_lr: float | Tensor | None = None,
    optimizer: Callable[..., Optimizer] = torch.optim.Adam,
    *,
    orthogonal_weight_decay: float = 0.0,
    hold_length: bool = False,
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
        orthogonal_weight_decay: the weight decay of the parameters from which weights are computed, 0 by default. It
            shortens reflection vectors, which makes their steps longer, and draws the methods that take a
            skew-symmetric matrix to the identity. Weights on the manifold have no decay.
        hold_length: whether to hold the length of reflection vectors, as :func:`hold_length` does. They then have no decay.
        project: moves weights that should be on the manifold, and are not, back to it; by default they are refused.
        options: for ``optimizer``. ``weight_decay`` holds for free parameters only, ``maximize`` for all parameters.

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
    if not orthogonal_weight_decay >= 0:
        raise ValueError(
            f"for_model: orthogonal_weight_decay must be at least 0, got {orthogonal_weight_decay}."
        )
    if orthogonal_lr is None:
        orthogonal_lr = lr
    computed, maps = _constrained(model)
    held: set[Tensor] = set()
    if hold_length:
        held = {vectors.parameter for vectors in directions(model)}
    named: dict[str, list[tuple[str, Tensor]]] = {"free": [], "orthogonal": [], "held": []}
    moved: dict[tuple, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, p in model.named_parameters():
        if p in maps:
            chart = maps[p]
            moved[chart.rule, chart.kernel is not None, tuple(chart.settings.items())].append(
                (name, p)
            )
        elif p in held:
            named["held"].append((name, p))
        elif p in computed:
            named["orthogonal"].append((name, p))
        else:
            named["free"].append((name, p))
    groups: list[dict[str, Any]] = []
    if named["free"]:
        groups.append({"params": named["free"], "lr": lr, "name": "free"})
    decays = {"orthogonal": orthogonal_weight_decay, "held": 0.0}
    constrained = [kind for kind in decays if named[kind]]
    groups += [
        {"params": named[kind], "lr": orthogonal_lr, "name": "orthogonal"} for kind in constrained
    ]
    parts: list[Optimizer] = []
    if groups:
        parts.append(optimizer(groups, lr=lr, **options))
        made = [group for group in parts[0].param_groups if group["name"] == "orthogonal"]
        for kind, group in zip(constrained, made, strict=True):
            _set_decay(parts[0], group, decays[kind])
        if hold_length:
            hold_lengths(parts[0], model)
    by_rule: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for (rule, kernel, settings), ps in moved.items():
        by_rule[rule].append({"params": ps, "name": "manifold", "kernel": kernel, **dict(settings)})
    more = {"project": project, "maximize": options.get("maximize", False)}
    parts += [RULES[rule](theirs, lr=orthogonal_lr, **more) for rule, theirs in by_rule.items()]
    if not parts:
        raise ValueError(f"for_model: {type(model).__name__} has no parameters.")
    return parts[0] if len(parts) == 1 else Joint(parts)


def _set_decay(optimizer: Optimizer, group: dict[str, Any], decay: float) -> None:
    if "weight_decay" in group:
        group["weight_decay"] = decay
    elif decay:
        raise ValueError(
            f"for_model: {type(optimizer).__name__} has no weight decay, but orthogonal_weight_decay is {decay}. "
            "Leave it out, or use an optimizer that has one, such as torch.optim.AdamW."
        )


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
