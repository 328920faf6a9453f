"""The benchmark ``stiefel``: one gradient step over N x M matrices with orthonormal columns (Table 2).

A map from free parameters takes its forward and backward pass; the addition that moves the parameters is not on the clock. On
the manifold a step is the projection of the gradient and the retraction, with no backward pass.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .. import init
from ..manifolds import stiefel
from ..optim import StiefelAdam
from ..parametrizations import METHODS
from ..parametrizations.rgd import OnManifold
from ..registry import Method
from ..testing import double, orthogonality_error
from . import matrix
from .entry import Case, Entry, gaussian
from .sizes import Size

RATE = 0.1


def baseline(size: Size, device: str) -> str:
    return "tcwy"


def paper(size: Size) -> dict[str, tuple[str, float]]:
    """Operations of the forward pass by Table 2, as a formula and as a number."""
    n, m = size[0], size[-1]
    return {
        "rgd-c-qr": ("10NM² - 2M³/3", 10 * n * m**2 - 2 * m**3 / 3),
        "rgd-e-qr": ("14NM² - 2M³/3", 14 * n * m**2 - 2 * m**3 / 3),
        "rgd-c-c": ("28NM² + 16M³", 28 * n * m**2 + 16 * m**3),
        "rgd-e-c": ("72NM² + 25M³", 72 * n * m**2 + 25 * m**3),
        "own": ("4NM² + 14M³/3", 4 * n * m**2 + 14 * m**3 / 3),
        "tcwy": ("4NM² + 7M³/3", 4 * n * m**2 + 7 * m**3 / 3),
    }


def entries(size: Size) -> list[Entry]:
    """What forms a matrix of this size, ours and the peers, and every method that moves one on the manifold."""
    # A class that has two names is timed once.
    moved = {method.build: method for method in METHODS.values() if method.on_manifold}
    found = matrix.entries(size)
    ours = [i for i, entry in enumerate(found) if entry.group == "ours"]
    return [*found[: ours[-1] + 1], *(_step(size, method) for method in moved.values()), *found[ours[-1] + 1 :]]


def _step(size: Size, method: Method) -> Entry:
    n, m = size[0], size[-1]

    def make(dtype: torch.dtype, device: torch.device) -> Case:
        chart = method.build(n, m, dtype=dtype, device=device)
        assert isinstance(chart, OnManifold)
        x = init.haar(n, m, dtype=dtype, device=device)
        g = gaussian(n, m, std=0.5 * n**-0.5, dtype=dtype, device=device)
        step = partial(_Adam if chart.rule == "adam" else _Descent, chart.settings)
        return Case(step(x), (g,), step(double(x)), orthogonality_error)

    about = f"one step of cwy.METHODS[{method.name!r}], of a given gradient"
    return Entry(method.name, about, make, group="ours", method=method.name, package="cwy", differentiable=False)


class _Descent:
    """A step from x by the gradient's projection and a retraction."""

    def __init__(self, settings: dict, x: Tensor) -> None:
        self.x, self.metric, self.retract = x, settings["metric"], stiefel.RETRACTIONS[settings["retraction"]]

    def __call__(self, g: Tensor) -> Tensor:
        return self.retract(self.x, stiefel.gradient(self.x, g, self.metric), -RATE)


class _Adam:
    """The first step from x of an optimiser, made off the clock; a copy of x and one of the result are on it."""

    def __init__(self, settings: dict, x: Tensor) -> None:
        self.x, self.point = x, x.clone().requires_grad_()
        self.optimizer = StiefelAdam([self.point], lr=RATE, error_if_nonfinite=False, **settings)

    def __call__(self, g: Tensor) -> Tensor:
        # Through .data, or the optimiser would look at what was written.
        self.point.data.copy_(self.x)
        self.point.grad = g.detach()
        self.optimizer.step()
        self.optimizer.state.clear()
        return self.point.detach().clone()
