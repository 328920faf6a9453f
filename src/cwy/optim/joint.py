"""Several optimisers as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from .base import KeepsPrecision, StiefelOptimizer, evaluated


class Joint(KeepsPrecision):
    """Optimisers of different parameters, driven as one: one ``step``, one state dict, one scheduler.

    Its groups and state are those of its parts, the very same objects, so that a scheduler or a gradient scaler need not know.
    Its defaults are the settings that every part has: where each has ``momentum``, or each ``betas``, ``OneCycleLR`` and
    ``CyclicLR`` can cycle it; of a mixture they refuse to, and take ``cycle_momentum=False``.

    Args:
        parts: the optimisers. Hooks registered on a part run with its own step.

    Example:
        >>> a, b = torch.nn.Parameter(torch.eye(3)), torch.nn.Parameter(torch.ones(3))
        >>> both = Joint([optim.StiefelSGD([a], lr=0.1), torch.optim.Adam([b])])
        >>> [group["lr"] for group in both.param_groups]
        [0.1, 0.001]
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        self._sizes = [len(part.param_groups) for part in self.parts]
        settings = self.parts[0].defaults if self.parts else {}
        shared = {
            name: value
            for name, value in settings.items()
            if all(name in part.defaults for part in self.parts)
        }
        super().__init__([group for part in self.parts for group in part.param_groups], shared)
        for part in self.parts:
            self.state.update(part.state)
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the first part of its kind: one with ``"stiefel": True`` to an optimiser on the manifold."""
        if len(self.param_groups) < sum(self._sizes):
            super().add_param_group(param_group)
            return
        wanted = bool(param_group.get("stiefel"))
        for i, part in enumerate(self.parts):
            if ("stiefel" in part.defaults) == wanted:
                part.add_param_group(param_group)
                self.param_groups = [group for part in self.parts for group in part.param_groups]
                self._sizes[i] += 1
                return
        which = "on the manifold" if wanted else "of free parameters"
        raise ValueError(
            f"Joint: no part is an optimiser {which}. Make one, and a new Joint with it."
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every part; ``closure``, if given, is called once before, and its loss returned."""
        loss = evaluated(closure)
        for part in self.parts:
            # A part that refuses its gradients or points does so before any has moved.
            if isinstance(part, StiefelOptimizer):
                part.check()
        for part in self.parts:
            part.step()
        return loss

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part, size in zip(self.parts, self._sizes, strict=True):
            part.__setstate__(
                {"state": self.state, "param_groups": [next(groups) for _ in range(size)]}
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts, "_sizes": self._sizes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()
