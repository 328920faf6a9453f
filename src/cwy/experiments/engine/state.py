"""All that a run must remember to go on as if it had never stopped."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import checkpoint, optimizers
from .config import ConfigError
from .distributed import Group
from .files import Damaged
from .meter import Diverged, Meter, all_finite
from .run import Folder, differences

SHOWN = 300
"""The most characters of a reason that are shown."""
LONGEST = 1e10
"""The most seconds of training that a checkpoint may count."""
KINDS: dict[str, tuple[type, ...]] = {
    "due": (bool,),
    "seconds": (int, float),
    "started": (str,),
    "best": (dict, NoneType),
    "weights": (dict,),
    "crossings": (dict,),
    "final": (dict,),
    "peak_memory": (int,),
}


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

    def save(
        self, folder: Folder, group: Group, model: nn.Module, optimizer: Optimizer, meter: Meter
    ) -> None:
        """Writes a checkpoint; what is not finite raises, and nothing is written."""
        whole = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "meter": meter.state_dict(group),
            "random": {name: group.gather(state) for name, state in _random(group.device).items()},
            "run": vars(self),
        }
        if not all_finite(whole):
            raise Diverged(
                f"a weight or what the optimiser remembers is not finite after step {self.step}"
            )
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
        steps: int,
    ) -> bool:
        """Reads the last whole checkpoint into all of these; False if there is none. Damaged ones are named by ``say``.

        Args:
            folder, group, model, optimizer, meter: what is restored, and from where.
            say: is told of checkpoints that are damaged.
            steps: of the whole run; a checkpoint of a later one raises.
        """
        content = group.broadcast(checkpoint.last(folder.checkpoints, say) if group.first else b"")
        if not content:
            return False
        try:
            whole = checkpoint.parse(content)
            self._check(folder, whole, steps)
            if whole["run"].get("weights"):
                # The best weights are loaded at the end of a run only. Whether they can be is found out now.
                model.load_state_dict(whole["run"]["weights"])
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
        except ConfigError:
            raise
        except Exception as error:
            # Its hash is right, but it may be forged: each of these calls has its own errors then.
            reason = (
                str(error) if isinstance(error, Damaged) else f"{type(error).__name__}: {error}"
            )
            raise Damaged(
                f"the last checkpoint in {folder.checkpoints} does not fit this run: {reason[:SHOWN]} "
                "To go on from the one before it, delete it."
            ) from error
        return True

    def _check(self, folder: Folder, whole: dict[str, Any], steps: int) -> None:
        """Raise unless the parts of a checkpoint are of this run and of the right types."""
        for name in ("model", "optimizer", "meter", "random", "run"):
            if not isinstance(whole.get(name), dict):
                raise Damaged(f"it has no {name!r}.")
        run = whole["run"]
        changed = differences(run["settings"], self.settings)
        if changed:
            raise ConfigError(
                f"{folder.path}: config.json is not that of its checkpoints: {', '.join(changed)}. "
                "Put it back, or start another run in another folder."
            )
        if type(run["step"]) is not int or not 0 <= run["step"] <= steps:
            raise Damaged(f"its step must be a whole number from 0 to {steps}.")
        if not all_finite(whole):
            raise Damaged("it has values that are not finite.")
        for name, kinds in KINDS.items():
            if name in run and type(run[name]) not in kinds:
                raise Damaged(f"its {name!r} is of the wrong type.")
        if not 0 <= run.get("seconds", 0.0) <= LONGEST:
            raise Damaged("its time is not one that a run takes.")
        _check_found(run)


def _check_found(run: dict[str, Any]) -> None:
    """Raise unless what the run has found so far are numbers by name."""
    best = run.get("best")
    if best is not None:
        types = type(best["metric"]), type(best["step"])
        value = best["value"]
        if types != (str, int) or type(value) not in (int, float) or not math.isfinite(value):
            raise Damaged("its best evaluation is none.")
    for level, step in run.get("crossings", {}).items():
        if not math.isfinite(float(level)) or type(step) not in (int, NoneType):
            raise Damaged("its crossings are no steps.")
    for metrics in run.get("final", {}).values():
        if not all(
            isinstance(value, int | float) and math.isfinite(value) for value in metrics.values()
        ):
            raise Damaged("its last metrics are no numbers.")


def _random(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states
