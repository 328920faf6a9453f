"""The benchmark ``stiefel``: a step over matrices with orthonormal columns (Table 2).

A map from free parameters takes its forward and backward pass. The addition that moves the
parameters is not on the clock. On the manifold a step is the projection of the gradient and the
retraction, with no backward pass.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ... import init
from ...api import orthogonality_error
from ...manifolds import stiefel
from ...ops._linalg import double
from ...optim import StiefelAdam
from ...parametrizations import METHODS
from ...parametrizations.marks import OnManifold
from ...registry import Method
from ..harness.entry import Case, Entry, gaussian
from . import Size, Suite, matrix

RATE = 0.1
"""The learning rate of every step."""


def baseline(size: Size, device: str) -> str:
    """Name the entry that the others are compared with."""
    return "tcwy"


def formulas(size: Size) -> dict[str, tuple[str, float]]:
    """Return Table 2's operations of the forward pass, as formulas and as numbers."""
    n, m = size
    return {
        "rgd-c-qr": ("10NM² - 2M³/3", 10 * n * m**2 - 2 * m**3 / 3),
        "rgd-e-qr": ("14NM² - 2M³/3", 14 * n * m**2 - 2 * m**3 / 3),
        "rgd-c-c": ("28NM² + 16M³", 28 * n * m**2 + 16 * m**3),
        "rgd-e-c": ("72NM² + 25M³", 72 * n * m**2 + 25 * m**3),
        "own": ("4NM² + 14M³/3", 4 * n * m**2 + 14 * m**3 / 3),
        "tcwy": ("4NM² + 7M³/3", 4 * n * m**2 + 7 * m**3 / 3),
    }


def entries(size: Size) -> list[Entry]:
    """List what forms a matrix of this size, and every method that moves one on the manifold."""
    # A class that has two names is timed once.
    moved = {method.build: method for method in METHODS.values() if method.on_manifold}
    steps = [_step(size, method) for method in moved.values()]
    formed = matrix.entries(size)
    peers = [entry for entry in formed if entry.group == "peer"]
    floor_and_ours = [entry for entry in formed if entry.group != "peer"]
    return [*floor_and_ours, *steps, *peers]


def _step(size: Size, method: Method) -> Entry:
    n, m = size

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        chart = method.build(n, m, dtype=dtype, device=device)
        assert isinstance(chart, OnManifold)
        x = init.haar(n, m, dtype=dtype, device=device)
        g = gaussian(n, m, std=0.5 * n**-0.5, dtype=dtype, device=device)
        step = partial(_Descent, chart.settings)
        if chart.rule == "adam":
            step = partial(_Adam, chart.settings)
        return Case(step(x), (g,), step(double(x)), orthogonality_error)

    return Entry(
        method.name,
        f"one step of cwy.METHODS[{method.name!r}], of a given gradient",
        make,
        group="ours",
        method=method.name,
        package="cwy",
        differentiable=False,
    )


class _Descent:
    """Take a step from x by the gradient's projection and a retraction."""

    def __init__(self, settings: dict, x: Tensor) -> None:
        self.x = x
        self.metric = settings["metric"]
        self.retract = stiefel.RETRACTIONS[settings["retraction"]]

    def __call__(self, g: Tensor) -> Tensor:
        direction = stiefel.gradient(self.x, g, self.metric)
        return self.retract(self.x, direction, -RATE)


class _Adam:
    """Take the first step from x of an optimizer, which is made off the clock.

    A copy of x and one of the result are on the clock.
    """

    def __init__(self, settings: dict, x: Tensor) -> None:
        self.x = x
        self.point = x.clone().requires_grad_()
        self.optimizer = StiefelAdam([self.point], lr=RATE, error_if_nonfinite=False, **settings)

    def __call__(self, g: Tensor) -> Tensor:
        # Through .data, or the optimizer would look at what was written.
        self.point.data.copy_(self.x)
        self.point.grad = g.detach()
        self.optimizer.step()
        self.optimizer.state.clear()
        return self.point.detach().clone()


SUITE = Suite(entries, baseline, formulas)
