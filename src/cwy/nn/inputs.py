"""What every recurrent layer and cell asks of its input."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def name_of(layer: nn.Module) -> str:
    """The name of a layer's class, without what torch puts before that of a parametrized one."""
    return type(layer).__name__.removeprefix("Parametrized")


def check_input(layer: nn.Module, x: Tensor, weight: Tensor, steps: int = 1) -> None:
    """Raises unless there is a step, and the input has the weights' dtype, or gets it: complex weights make it complex."""
    if steps == 0:
        raise ValueError(f"{name_of(layer)}: expected at least one step, got input of shape {tuple(x.shape)}.")
    if x.dtype == weight.dtype or weight.is_complex():
        return
    # Autocast leaves float64 alone, and what is not floating-point.
    if not (x.is_floating_point() and x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)):
        raise ValueError(
            f"{name_of(layer)}: the input is {x.dtype}, but the weights are {weight.dtype}. "
            f"Convert the input with .to({weight.dtype}), or the layer."
        )
