"""State dicts: a constrained weight takes a plain one, such as that of a baked model."""

from __future__ import annotations

import copy
import warnings
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils import parametrize

from .._torch import load_state_dict_pre_hooks
from .base import OrthogonalMap


def take_plain_weights(module: nn.Module) -> None:
    """Let ``module.load_state_dict`` take orthogonal weights in place of their free parameters.

    The state dict has them under their own names.
    """
    if not _hook_keys(module):
        module.register_load_state_dict_pre_hook(_fill)


def take_no_plain_weights(module: nn.Module) -> None:
    """Undo :func:`take_plain_weights`, so that nothing of this library stays with a module."""
    for key in _hook_keys(module):
        del load_state_dict_pre_hooks(module)[key]


def _hook_keys(module: nn.Module) -> list[int]:
    """Return the keys under which the hook of this file is registered."""
    hooks = load_state_dict_pre_hooks(module)
    return [key for key, hook in hooks.items() if getattr(hook, "hook", hook) is _fill]


def _fill(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Put the free parameters of plain weights in their place."""
    for name, chain in getattr(module, "parametrizations", {}).items():
        if len(chain) != 1 or not isinstance(chain[0], OrthogonalMap):
            continue
        plain = state_dict.get(prefix + name)
        inside = f"{prefix}parametrizations.{name}."
        if plain is None or any(key.startswith(inside) for key in state_dict):
            continue
        try:
            found = _state(chain, plain)
        except (TypeError, ValueError) as error:
            # Torch then reports the key as unexpected, unless strict=False: a hook can't see which.
            warnings.warn(f"load_state_dict: {prefix}{name} is not loaded. {error}", stacklevel=2)
            continue
        del state_dict[prefix + name]
        state_dict.update({inside + key: value for key, value in found.items()})


@torch.no_grad()
def _state(chain: parametrize.ParametrizationList, plain: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the state of a weight's parametrization that has this value."""
    # The inverse writes signs, and the like, to the map. A load that fails must not.
    chart = copy.deepcopy(cast(OrthogonalMap, chain[0]))
    free = chart.right_inverse(plain)
    state = {f"0.{key}": value for key, value in chart.state_dict().items()}
    if isinstance(free, torch.Tensor):
        return {"original": free, **state}
    originals = {f"original{index}": part for index, part in enumerate(free)}
    return {**originals, **state}
