"""Warn when an optimizer that does not know the manifold steps a weight that lives on it.

The hook is global and is registered with the first such weight, so that other programs never run
it. It looks at an optimizer once, and again only after weights were marked or groups added.
"""

from __future__ import annotations

import warnings
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Mark(Protocol):
    """Describe a mark of a weight on the manifold."""

    def parameter(self) -> Tensor | None:
        """Return the weight, or None if it is no longer marked."""


class _Watch:
    """Hold the weights that are watched, those reported, and the optimizers that were checked."""

    def __init__(self) -> None:
        self.marks: WeakSet[Any] = WeakSet()
        self.reported: WeakSet[Any] = WeakSet()
        self.looked_at: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()
        self.added = 0
        self.registered = False


_watch = _Watch()


def watch(mark: Mark) -> None:
    """Warn of the first step that an optimizer without the manifold makes with this weight."""
    _watch.marks.add(mark)
    _watch.added += 1
    if not _watch.registered:
        register_optimizer_step_pre_hook(_before_step)
        _watch.registered = True


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    """Warn of watched weights that this optimizer is about to step."""
    if torch.compiler.is_compiling():
        return
    state = (_watch.added, len(optimizer.param_groups))
    if _watch.looked_at.get(optimizer) == state:
        return
    free = []
    for group in optimizer.param_groups:
        if not group.get("stiefel"):
            free += group["params"]
    stepped = {id(p) for p in free if p.grad is not None}
    waiting = {id(p) for p in free if p.grad is None}
    found = []
    all_seen = True
    for mark in list(_watch.marks):
        weight = mark.parameter()
        if weight is None or mark in _watch.reported:
            continue
        if id(weight) in stepped:
            found.append(mark)
        elif id(weight) in waiting:
            all_seen = False
    # A weight without a gradient is not stepped yet: look again at the next step.
    if all_seen:
        _watch.looked_at[optimizer] = state
    if found:
        _watch.reported.update(found)
        _warn(optimizer, found)


def _warn(optimizer: Optimizer, found: list[Any]) -> None:
    shapes = ", ".join(str(tuple(mark.parameter().shape)) for mark in found)
    kind = type(optimizer).__name__
    warnings.warn(
        f"{kind} steps {len(found)} weight(s) of the methods 'rgd-…', of shape {shapes}, "
        "and takes them off the manifold: they are no longer orthogonal. "
        f"Make the optimizer with cwy.optim.for_model(model, lr=…, optimizer={kind}), "
        "or free the weights with cwy.bake.",
        stacklevel=4,
    )
