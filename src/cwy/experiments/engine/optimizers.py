"""The optimiser of a run: constrained and free parameters, each with its rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...api import named_constraints, orthogonality_error
from ...optim import for_model
from .config import Config
from .files import Damaged


def build(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Free parameters at ``lr``, constrained ones at ``orthogonal_lr``; weights on the manifold get its own optimiser."""
    on_gpu = next(model.parameters()).is_cuda
    # One pass over all that Adam remembers, where it is there: for real parameters.
    fused = (
        on_gpu
        and config.optimizer == "adam"
        and all(p.is_floating_point() for p in model.parameters())
    )
    options: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
    if config.optimizer != "sgd":
        options["capturable"] = on_gpu
    if config.optimizer == "rmsprop":
        options["alpha"] = config.alpha
    kind = {"rmsprop": torch.optim.RMSprop, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[
        config.optimizer
    ]
    optimizer = for_model(model, config.lr, config.orthogonal_lr, kind, **options)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer


REMEMBERED = {
    torch.optim.RMSprop: {"step", "square_avg"},
    torch.optim.Adam: {"step", "exp_avg", "exp_avg_sq"},
}
"""What torch's optimizers must find of a parameter, if they find anything."""


def load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Reads a state dict, perhaps of another device: what is remembered is its, how a step is computed is this device's.

    A state that is not of these parameters raises :class:`Damaged`.
    """
    for theirs, ours in zip(state["param_groups"], optimizer.param_groups, strict=True):
        theirs |= {
            key: ours[key]
            for key in ours
            if key != "params" and not _both_numbers(theirs.get(key), ours[key])
        }
        for index, p in zip(theirs["params"], ours["params"], strict=True):
            _check_remembered(state["state"].get(index, {}), p)
    optimizer.load_state_dict(state)
    for part in getattr(optimizer, "parts", [optimizer]):
        needed = REMEMBERED.get(type(part), set())
        every = [p for group in part.param_groups for p in group["params"]]
        if any(not needed <= part.state[p].keys() for p in every if part.state.get(p)):
            raise Damaged(
                f"the optimizer must remember {' and '.join(sorted(needed))} of a parameter."
            )


def _both_numbers(theirs: Any, ours: Any) -> bool:
    """Whether both are finite numbers: only then is a checkpoint's option taken over."""
    return type(theirs) in (int, float) and type(ours) in (int, float) and math.isfinite(theirs)


def _check_remembered(found: dict[str, Any], p: Tensor) -> None:
    """Raise unless an optimizer may remember this of a parameter."""
    for name, value in found.items():
        if name == "momentum_buffer" and value is None:
            continue
        fits = isinstance(value, Tensor) and value.shape == p.shape
        if name == "step":
            fits = type(value) in (int, float) or (isinstance(value, Tensor) and value.numel() == 1)
        elif name == "exp_avg_norm":
            # One number per matrix.
            fits = isinstance(value, Tensor) and value.numel() <= p.numel()
        if fits and isinstance(value, Tensor):
            fits = value.is_complex() <= p.is_complex()
        if not fits:
            raise Damaged(
                f"what the optimizer remembers as {name!r} does not fit a parameter of shape {tuple(p.shape)}."
            )


@torch.no_grad()
def worst_orthogonality(model: nn.Module) -> float | None:
    """The largest orthogonality error of the model's constrained weights; None if it has none."""
    return max(map(orthogonality_error, constrained(model)), default=None)


def constrained(model: nn.Module) -> Iterator[Tensor]:
    """Yield every constrained weight as a matrix."""
    for layer, name, chart, _ in named_constraints(model):
        yield chart.as_matrix(getattr(layer, name))
