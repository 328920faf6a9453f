"""Sums of metrics, kept on the device, and the search for values that are not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .distributed import Group
from .files import Damaged


class Diverged(RuntimeError):
    """A loss, a gradient or an orthogonality error with which a run can't go on."""

    status = 3


def all_finite(state: Any) -> bool:
    """Whether no tensor in a nest of dictionaries and lists has a NaN or an infinity. Waits for the device."""
    if isinstance(state, Tensor):
        return bool(state.isfinite().all())
    parts = (
        state.values()
        if isinstance(state, dict)
        else state
        if isinstance(state, list | tuple)
        else ()
    )
    return all(map(all_finite, parts))


class Meter:
    """Means of metrics since the last reading, over steps and ranks."""

    def __init__(self, device: torch.device) -> None:
        self.names: list[str] = []
        self.sums = torch.zeros(0, dtype=torch.float64, device=device)
        self.steps = 0

    def add(self, metrics: dict[str, Tensor], weight: float) -> None:
        """Adds what a step measured; ``weight`` is this rank's share of it. ``steps`` is counted by the loop."""
        if not self.names:
            self.names, self.sums = list(metrics), self.sums.new_zeros(len(metrics))
        if self.names != list(metrics):
            raise Damaged(
                f"the last checkpoint has sums of {self.names}, but the run measures {list(metrics)}."
            )
        self.sums.add_(torch.stack([value.detach() for value in metrics.values()]), alpha=weight)

    def read(self, group: Group) -> dict[str, float]:
        """The means, and a new start. Waits for the device."""
        means = (group.mean(self.sums) / max(self.steps, 1)).tolist()
        self.sums.zero_()
        self.steps = 0
        return dict(zip(self.names, means, strict=True))

    def state_dict(self, group: Group) -> dict[str, Any]:
        return {"names": self.names, "sums": group.mean(self.sums.clone()), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names, sums, steps = state["names"], state["sums"], state["steps"]
        if type(names) is not list or sums.shape != (len(names),) or sums.dtype != self.sums.dtype:
            raise Damaged("its sums of metrics have no such names.")
        if type(steps) is not int or steps < 0:
            raise Damaged("its sums of metrics are of no number of steps.")
        self.names, self.sums, self.steps = names, sums.to(self.sums.device), steps
