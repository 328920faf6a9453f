"""The optimizer of a run: constrained and free parameters, each with its learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ...api import named_constraints, orthogonality_error
from ...optim import for_model
from .config import Config
from .files import Damaged

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}
REMEMBERED = {
    torch.optim.RMSprop: {"step", "square_avg"},
    torch.optim.Adam: {"step", "exp_avg", "exp_avg_sq"},
}
"""The entries that an optimizer's state of a parameter must have, unless it is empty."""


def schedulable(config: Config) -> bool:
    """Return whether the optimizer reads its learning rates from tensors inside a CUDA graph."""
    return config.optimizer == "adam"


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rates to a multiple of the initial ones. Tensors are written in place."""
    for group in optimizer.param_groups:
        rate = group["initial_lr"] * factor
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def build(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Return an optimizer with ``lr`` for free and ``orthogonal_lr`` for constrained parameters.

    Weights on the manifold get the manifold's own optimizer.
    """
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    real = all(p.is_floating_point() for p in model.parameters())
    options: dict[str, Any] = {"foreach": True}
    if on_gpu and real and config.optimizer == "adam":
        # One pass over Adam's state. Torch has it for real parameters only.
        options = {"fused": True}
    if config.optimizer != "sgd":
        options["capturable"] = on_gpu
    if config.optimizer == "rmsprop":
        options["alpha"] = config.alpha
    lr: float | Tensor = config.lr
    orthogonal_lr: float | Tensor = config.orthogonal_lr
    if on_gpu and config.warmup is not None and schedulable(config):
        # A captured step reads them anew at each replay.
        lr = torch.tensor(config.lr, device=device)
        orthogonal_lr = torch.tensor(config.orthogonal_lr, device=device)
    optimizer = for_model(model, lr, orthogonal_lr, OPTIMIZERS[config.optimizer], **options)
    for group in optimizer.param_groups:
        group["initial_lr"] = float(group["lr"])
    return optimizer


def skip_steps(optimizer: torch.optim.Optimizer, when: Tensor) -> None:
    """Let fused optimizers skip each step at which ``when`` is 1.

    A skipped step changes neither the weights nor what Adam remembers.

    Args:
        optimizer: an optimizer, or a :class:`cwy.optim.Joint`.
        when: 0 or 1, a float32 scalar on the device of the weights. It is read at each step.
    """
    for part in _parts(optimizer):
        if _is_fused(part):
            # The name by which a gradient scaler hands over the same. A deepcopy loses it.
            part.found_inf = when


def unskipped(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters whose optimizer takes every step, also after :func:`skip_steps`."""
    found: list[Tensor] = []
    for part in _parts(optimizer):
        if not _is_fused(part):
            found += [p for group in part.param_groups for p in group["params"]]
    return found


def _parts(optimizer: torch.optim.Optimizer) -> list[Any]:
    return getattr(optimizer, "parts", [optimizer])


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


def load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state dict, perhaps from another device.

    Options that decide how a step is computed stay those of this device. A state that is not of
    these parameters raises :class:`Damaged`.
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
    for part in _parts(optimizer):
        needed = REMEMBERED.get(type(part), set())
        every = [p for group in part.param_groups for p in group["params"]]
        if any(not needed <= part.state[p].keys() for p in every if part.state.get(p)):
            raise Damaged(
                f"the optimizer must remember {' and '.join(sorted(needed))} of a parameter."
            )


def _both_numbers(theirs: Any, ours: Any) -> bool:
    """Return whether both are numbers: only then is a checkpoint's option taken over."""
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
                f"what the optimizer remembers as {name!r} does not fit "
                f"a parameter of shape {tuple(p.shape)}."
            )


@torch.no_grad()
def worst_orthogonality(model: nn.Module) -> float | None:
    """Return the largest orthogonality error of the constrained weights, None without any."""
    if not is_constrained(model):
        return None
    return orthogonality_error(model)


def is_constrained(model: nn.Module) -> bool:
    """Return whether the model has a constrained weight."""
    return next(named_constraints(model), None) is not None
