"""Checks of the settings and the input of recurrent layers and cells."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops import dispatch


def name_of(layer: nn.Module) -> str:
    """Return the name of a layer's class, without the prefix of a parametrized one."""
    return type(layer).__name__.removeprefix("Parametrized")


def check_counts(call: str, **counts: int) -> None:
    """Raise unless these are whole numbers from 1 on."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"{call}: {name} must be a whole number, got {count!r}.")
        if count < 1:
            raise ValueError(f"{call}: {name} must be at least 1, got {count}.")


def check_switches(call: str, **switches: bool) -> None:
    """Raise unless these are True or False. Any other value, even "False", would mean True."""
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise TypeError(f"{call}: {name} must be True or False, got {switch!r}.")


def check_backend(call: str, op: str, backend: str) -> None:
    """Raise unless an op has a backend of this name."""
    names = ["auto", *(known.name for known in dispatch.backends(op)[op])]
    if backend not in names:
        raise ValueError(
            f"{call}: backend must be one of {', '.join(map(repr, names))}, got {backend!r}."
        )


def check_input(layer: nn.Module, x: Tensor, weight: Tensor, steps: int = 1) -> None:
    """Raise unless there is a step, and the input has the weights' dtype or gets it.

    Complex weights make it complex.
    """
    if steps == 0:
        raise ValueError(
            f"{name_of(layer)}: expected at least one step, got input of shape {tuple(x.shape)}."
        )
    if x.dtype == weight.dtype or weight.is_complex():
        return
    # Autocast does not convert float64, nor what is not floating-point.
    converts = x.is_floating_point() and x.dtype != torch.float64
    if not (converts and torch.is_autocast_enabled(x.device.type)):
        raise ValueError(
            f"{name_of(layer)}: the input is {x.dtype}, but the weights are {weight.dtype}. "
            f"Convert the input with .to({weight.dtype}), or the layer."
        )
