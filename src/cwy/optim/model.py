"""The right optimizer for a model with any mix of methods."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..api import named_constraints
from ..parametrizations.marks import OnManifold
from .adam import StiefelAdam
from .hold import directions
from .hold import hold_length as hold_lengths
from .joint import Joint
from .sgd import StiefelSGD

RULES = {"sgd": StiefelSGD, "adam": StiefelAdam}

_P = ParamSpec("_P")


def _rates_first(call: Callable[_P, Optimizer]) -> Callable[_P, Optimizer]:
    """Raise an error that names the mistake if an optimizer is passed as a learning rate."""

    @functools.wraps(call)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> Optimizer:
        # Python itself would raise that lr was given twice, before the body could look.
        given = dict(zip(("lr", "orthogonal_lr"), args[1:], strict=False))
        for name in ("lr", "orthogonal_lr"):
            rate = given.get(name, kwargs.get(name))
            if callable(rate) and not isinstance(rate, Tensor):
                kind = getattr(rate, "__name__", type(rate).__name__)
                raise TypeError(
                    f"for_model: {name} must be a number or a tensor, got {kind}. "
                    f"An optimizer goes by its name: for_model(model, lr=1e-3, optimizer={kind})."
                )
            if isinstance(rate, str):
                raise TypeError(f"for_model: {name} must be a number or a tensor, got {rate!r}.")
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
    """Return the optimizer that every parameter of a model needs, as one object.

    Free parameters, and those from which :func:`cwy.orthogonal` computes a weight, go to
    ``optimizer``. Weights on the manifold (methods ``rgd-…``) go to :class:`StiefelSGD` or
    :class:`StiefelAdam`, according to their method.

    Args:
        model: a module whose layers are constrained already.
        lr: the learning rate of free parameters.
        orthogonal_lr: the learning rate of all constrained parameters, ``lr`` by default.
        optimizer: a class of ``torch.optim``, or a function that makes such an optimizer from
            groups and options.
        orthogonal_weight_decay: the weight decay of the parameters from which weights are computed,
            0 by default. It shortens reflection vectors, which makes their steps longer, and draws
            the methods that take a skew-symmetric matrix to the identity. Weights on the manifold
            have no decay.
        hold_length: whether to hold the length of reflection vectors, as :func:`hold_length` does.
            They then have no decay.
        project: whether to move weights that are off the manifold back to it. The default raises
            an error.
        options: for ``optimizer``. ``weight_decay`` holds for free parameters only, ``maximize``
            for all parameters.

    Returns:
        An ``optimizer`` if no weight is on the manifold, else a :class:`Joint` or the one part that
        is needed. Its groups are named "free", "orthogonal" and "manifold".

    Example:
        >>> methods = ("cwy", "rgd-c-c")
        >>> layers = [orthogonal(torch.nn.Linear(4, 4), method=method) for method in methods]
        >>> optimizer = for_model(torch.nn.Sequential(*layers), lr=1e-3, orthogonal_lr=1e-2)
        >>> [(group["name"], group["lr"]) for group in optimizer.param_groups]
        [('free', 0.001), ('orthogonal', 0.01), ('manifold', 0.01)]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"for_model: expected a torch.nn.Module, got {type(model).__name__}.")
    if not callable(optimizer):
        raise TypeError(
            "for_model: optimizer must be a class or a function that makes an optimizer, got "
            f"an object of type {type(optimizer).__name__}. "
            "Pass the class itself, e.g. optimizer=torch.optim.AdamW."
        )
    if not orthogonal_weight_decay >= 0:
        raise ValueError(
            f"for_model: orthogonal_weight_decay must be at least 0, got {orthogonal_weight_decay}."
        )
    if orthogonal_lr is None:
        orthogonal_lr = lr
    kinds = _sort(model, hold_length)
    parts: list[Optimizer] = []
    decays = {"orthogonal": orthogonal_weight_decay, "held": 0.0}
    groups = _groups(kinds, lr, orthogonal_lr)
    if groups:
        parts.append(optimizer(groups, lr=lr, **options))
        made = [group for group in parts[0].param_groups if group["name"] == "orthogonal"]
        constrained = [kind for kind in decays if kinds.named[kind]]
        for kind, group in zip(constrained, made, strict=True):
            _set_decay(parts[0], group, decays[kind])
        if hold_length:
            hold_lengths(parts[0], model)
    maximize = options.get("maximize", False)
    for rule, theirs in kinds.on_manifold.items():
        parts.append(RULES[rule](theirs, lr=orthogonal_lr, project=project, maximize=maximize))
    if not parts:
        raise ValueError(f"for_model: {type(model).__name__} has no parameters.")
    if len(parts) == 1:
        return parts[0]
    return Joint(parts)


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Hold the parameters of a model, sorted by what they need.

    Attributes:
        named: the parameters off the manifold and their names: "free", "orthogonal" and "held".
        on_manifold: per rule, the groups of weights on the manifold.
    """

    named: dict[str, list[tuple[str, Tensor]]]
    on_manifold: dict[str, list[dict[str, Any]]]


def _sort(model: nn.Module, hold_length: bool) -> _Kinds:
    computed, maps = _constrained(model)
    held: set[Tensor] = set()
    if hold_length:
        held = {vectors.parameter for vectors in directions(model)}
    named: dict[str, list[tuple[str, Tensor]]] = {"free": [], "orthogonal": [], "held": []}
    moved: dict[tuple, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, p in model.named_parameters():
        if p in maps:
            chart = maps[p]
            alike = (chart.rule, chart.kernel is not None, tuple(chart.settings.items()))
            moved[alike].append((name, p))
        elif p in held:
            named["held"].append((name, p))
        elif p in computed:
            named["orthogonal"].append((name, p))
        else:
            named["free"].append((name, p))
    on_manifold: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for (rule, kernel, settings), ps in moved.items():
        group = {"params": ps, "name": "manifold", "kernel": kernel, **dict(settings)}
        on_manifold[rule].append(group)
    return _Kinds(named, on_manifold)


def _groups(
    kinds: _Kinds, lr: float | Tensor, orthogonal_lr: float | Tensor
) -> list[dict[str, Any]]:
    """Return the groups of the parameters that are not on the manifold."""
    rates = {"free": lr, "orthogonal": orthogonal_lr, "held": orthogonal_lr}
    names = {"free": "free", "orthogonal": "orthogonal", "held": "orthogonal"}
    return [
        {"params": params, "lr": rates[kind], "name": names[kind]}
        for kind, params in kinds.named.items()
        if params
    ]


def _set_decay(optimizer: Optimizer, group: dict[str, Any], decay: float) -> None:
    if "weight_decay" in group:
        group["weight_decay"] = decay
    elif decay:
        raise ValueError(
            f"for_model: {type(optimizer).__name__} has no weight decay, but "
            f"orthogonal_weight_decay is {decay}. Leave it out, or use an optimizer that has one, "
            "such as torch.optim.AdamW."
        )


def _constrained(model: nn.Module) -> tuple[set[Tensor], dict[Tensor, OnManifold]]:
    """Return the parameters that weights are computed from, and the maps of manifold weights."""
    computed: set[Tensor] = set()
    maps: dict[Tensor, OnManifold] = {}
    for layer, name, chart, free in named_constraints(model):
        if isinstance(chart, OnManifold):
            maps[free[0]] = chart
        else:
            # A map of another library may share the weight, with parameters of its own.
            computed.update(cast(nn.ModuleDict, layer.parametrizations)[name].parameters())
    return computed, maps
