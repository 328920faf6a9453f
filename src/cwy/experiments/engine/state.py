"""All that a run must remember to go on as if it had never stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import checkpoint, optimizers
from .config import ConfigError
from .distributed import Group
from .meter import Diverged, Meter, all_finite
from .run import Folder, differences


@dataclass
class State:
    """What is neither in the model nor in the optimiser.

    Attributes:
        settings: the run's, as ``config.json`` holds them.
        step: steps done.
        due: whether the evaluation of that step is still to come, or to come again.
        seconds: training time.
        started: when the run began.
        best: the best evaluation: metric, value and step.
        weights: the model's state then, on the host. A checkpoint holds it: the file of the best state may be that of a step
            which a run that goes on does not come to again.
        crossings: when the training loss first fell to each threshold.
        final: the last metrics of each split.
        peak_memory: the most bytes that training took on a GPU; 0 elsewhere.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    due: bool = False
    seconds: float = 0.0
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    best: dict[str, Any] | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)
    crossings: dict[str, int | None] = field(default_factory=dict)
    final: dict[str, dict[str, float]] = field(default_factory=dict)
    peak_memory: int = 0

    def save(self, folder: Folder, group: Group, model: nn.Module, optimizer: Optimizer, meter: Meter) -> None:
        """Writes a checkpoint; what is not finite raises, and nothing is written."""
        whole = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "meter": meter.state_dict(group),
            "random": {name: group.gather(state) for name, state in _random(group.device).items()},
            "run": vars(self),
        }
        if not all_finite(whole):
            raise Diverged(f"a weight or what the optimiser remembers is not finite after step {self.step}")
        if group.first:
            checkpoint.save(folder.checkpoints, self.step, whole)
        # A rank that leaves early would have torchrun end the one that writes.
        group.wait()

    def restore(
        self,
        folder: Folder,
        group: Group,
        model: nn.Module,
        optimizer: Optimizer,
        meter: Meter,
        say: Callable[[str], object],
    ) -> bool:
        """Reads the last whole checkpoint into all of these; False if there is none. Damaged ones are named by ``say``."""
        content = group.broadcast(checkpoint.last(folder.checkpoints, say) if group.first else b"")
        if not content:
            return False
        whole = checkpoint.parse(content)
        changed = differences(whole["run"]["settings"], self.settings)
        if changed:
            raise ConfigError(
                f"{folder.path}: config.json is not that of its checkpoints: {', '.join(changed)}. "
                "Put it back, or start another run in another folder."
            )
        model.load_state_dict(whole["model"])
        optimizers.load(optimizer, whole["optimizer"])
        meter.load_state_dict(whole["meter"])
        for f in fields(self):
            if f.name != "settings":  # the device may be another one
                setattr(self, f.name, whole["run"].get(f.name, getattr(self, f.name)))
        rank = group.rank % len(whole["random"]["cpu"])
        torch.set_rng_state(whole["random"]["cpu"][rank])
        if group.device.type == "cuda" and "cuda" in whole["random"]:
            torch.cuda.set_rng_state(whole["random"]["cuda"][rank], group.device)
        return True


def _random(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states
