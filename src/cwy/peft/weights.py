"""The weight of a base layer as a dense matrix: its shape, its values, and how to replace it."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D


class Features(NamedTuple):
    """Hold the sizes of a layer's matrix. A convolution has one column per entry of a patch."""

    into: int
    out: int


def features(base: nn.Module) -> Features:
    """Return the sizes of a layer's matrix, or raise if the layer can't be adapted."""
    if isinstance(base, nn.Conv2d):
        if base.groups > 1:
            raise NotImplementedError(
                f"cwy.peft: a convolution with groups={base.groups} can't be adapted. Leave it out "
                "with exclude_modules."
            )
        return Features(base.weight[0].numel(), base.out_channels)
    if isinstance(base, NonDynamicallyQuantizableLinear):
        raise TypeError(
            "cwy.peft: torch.nn.MultiheadAttention reads the weight of its out_proj and never "
            "calls it, so an adapter would have no effect. Leave it out with exclude_modules."
        )
    if isinstance(base, Conv1D):
        return Features(base.weight.shape[0], base.weight.shape[1])
    for into, out in (("in_features", "out_features"), ("infeatures", "outfeatures")):
        if hasattr(base, into) and hasattr(base, out):
            return Features(cast(int, getattr(base, into)), cast(int, getattr(base, out)))
    raise TypeError(
        f"cwy.peft: {type(base).__name__} can't be adapted, only linear layers, also quantized "
        "ones, and torch.nn.Conv2d. Check target_modules."
    )


def is_quantized(base: nn.Module) -> bool:
    """Return whether a layer has no plain weight in a floating dtype."""
    weight = getattr(base, "weight", None)
    if type(weight) not in (Tensor, nn.Parameter):
        return True
    return not cast(Tensor, weight).is_floating_point()


def dense_weight(base: nn.Module) -> Tensor:
    """Return the weight as a matrix ``(out, in)`` in float32, or float64 if it is in that."""
    if is_quantized(base):
        weight = _dequantized(base)
    else:
        weight = cast(Tensor, base.weight).detach()
    if weight.dtype != torch.float64:
        weight = weight.float()
    if isinstance(base, Conv1D):
        return weight.mT
    return weight.flatten(1)


def _dequantized(base: nn.Module) -> Tensor:
    weight = getattr(base, "weight", None)
    if isinstance(weight, Tensor) and type(weight).__module__.startswith("torchao"):
        return weight.detach().dequantize()
    try:
        return dequantize_module_weight(base).detach()
    except (TypeError, AttributeError, NotImplementedError) as error:
        raise TypeError(
            f"cwy.peft: the weight of {type(base).__name__} can't be read as floating-point "
            f"numbers: {error}"
        ) from error


def write_weight(base: nn.Module, matrix: Tensor) -> None:
    """Replace the values of a layer's weight by those of a matrix ``(out, in)``."""
    if is_quantized(base):
        raise TypeError(
            f"cwy.peft: the quantized weight of {type(base).__name__} can't be merged with an "
            "adapter without loss. Dequantize the model first, or use cwy.peft.save_as_lora."
        )
    weight = cast(Tensor, base.weight)
    if isinstance(base, Conv1D):
        matrix = matrix.mT
    weight.data = matrix.reshape(weight.shape).to(weight.dtype).contiguous()
