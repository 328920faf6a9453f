"""Several optimizers as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from .base import KeepsPrecision, StiefelOptimizer, evaluate


class Joint(KeepsPrecision):
    """Drive optimizers of different parameters as one: one ``step``, state dict and scheduler.

    The groups and the state are those of the parts, the very same objects, so that a scheduler or
    a gradient scaler needs no change. The defaults are the settings that every part has. If every
    part has ``momentum``, or every part has ``betas``, ``OneCycleLR`` and ``CyclicLR`` can cycle
    it. A mixture of both needs ``cycle_momentum=False``.

    Args:
        parts: the optimizers. Hooks registered on a part run with its own step.

    Example:
        >>> a, b = torch.nn.Parameter(torch.eye(3)), torch.nn.Parameter(torch.ones(3))
        >>> both = Joint([optim.StiefelSGD([a], lr=0.1), torch.optim.Adam([b])])
        >>> [group["lr"] for group in both.param_groups]
        [0.1, 0.001]
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        self._sizes = [len(part.param_groups) for part in self.parts]
        settings: dict[str, Any] = {}
        if self.parts:
            settings = self.parts[0].defaults
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
        """Add a group to the first part of its kind.

        A group with ``"stiefel": True`` goes to an optimizer on the manifold.
        """
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
        kind = "of free parameters"
        if wanted:
            kind = "on the manifold"
        raise ValueError(
            f"Joint: no part is an optimizer {kind}. Make one, and a new Joint with it."
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of every part.

        Args:
            closure: computes the loss and the gradients. It is called once, before the first part.

        Returns:
            The value of the closure, or None without one.
        """
        loss = evaluate(closure)
        for part in self.parts:
            # A part that refuses its gradients or points raises before any parameter moves.
            if isinstance(part, StiefelOptimizer):
                part.check()
        for part in self.parts:
            part.step()
        return loss

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part, size in zip(self.parts, self._sizes, strict=True):
            theirs = [next(groups) for _ in range(size)]
            part.__setstate__({"state": self.state, "param_groups": theirs})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts, "_sizes": self._sizes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()
