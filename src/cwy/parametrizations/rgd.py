"""No map at all: the weight itself is the parameter, and an optimiser of ``cwy.optim`` moves it along the manifold."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..ops._linalg import double, nearest_orthogonal
from ..registry import register
from . import _foreign_steps
from .base import OrthogonalMap


class OnManifold(OrthogonalMap):
    """Stands beside a weight that lives on the manifold, and says which optimiser moves it, and how."""

    rule: ClassVar[Literal["sgd", "adam"]]
    settings: dict[str, Any]
    _owner: weakref.ref[nn.Module] | None = None
    _name: str = ""

    def parameter(self) -> Tensor | None:
        """Return the parameter that this map marks, or None if its module is gone or was baked."""
        owner = None if self._owner is None else self._owner()
        if owner is None or on_manifold(owner).get(self._name) is not self:
            return None
        return owner._parameters.get(self._name)

    def mark(self, owner: nn.Module, name: str) -> None:
        """Mark a parameter of a module, so that a step of an optimizer of another kind warns."""
        # A strong reference would close a cycle, and the module's memory would wait for the garbage collector.
        self._owner = weakref.ref(owner)
        self._name = name
        _foreign_steps.watch(self)

    def __getstate__(self) -> dict[str, Any]:
        owner = None if self._owner is None else self._owner()
        return {**self.__dict__, "_owner": owner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # deepcopy and pickle put the copy of the module in the place of the module.
        owner = state.get("_owner")
        super().__setstate__({**state, "_owner": None})
        if owner is not None:
            self.mark(owner, state["_name"])

    def matrix(self, x: Tensor) -> Tensor:
        return x

    def free(self, matrix: Tensor) -> Tensor:
        return nearest_orthogonal(double(matrix)).to(matrix)

    def sample(self) -> Tensor:
        half = self.dtype in (torch.float16, torch.bfloat16)
        x = torch.randn(
            *self.batch,
            self.n,
            self.m,
            dtype=torch.float32 if half else self.dtype,
            device=self.device,
        )
        q, r = torch.linalg.qr(x)
        return (q * r.diagonal(dim1=-2, dim2=-1).sgn().unsqueeze(-2)).to(self.dtype)

    def extra_repr(self) -> str:
        return ", ".join(
            [super().extra_repr(), *(f"{key}={value!r}" for key, value in self.settings.items())]
        )


def keep(module: nn.Module, name: str, chart: OnManifold) -> None:
    """Marks a module's parameter: the map becomes a child of the module, without state, and goes where the module goes."""
    module.on_manifold = nn.ModuleDict({**on_manifold(module), name: chart})
    chart.mark(module, name)


def on_manifold(module: nn.Module) -> dict[str, OnManifold]:
    """The maps of a module's own parameters that live on the manifold, by the parameter's name."""
    kept = module._modules.get("on_manifold")
    return (
        {n: chart for n, chart in kept.items() if isinstance(chart, OnManifold)}
        if isinstance(kept, nn.ModuleDict)
        else {}
    )


def release(module: nn.Module) -> list[str]:
    """Takes the marks off a module's parameters; returns their names."""
    names = [*on_manifold(module)]
    if names:
        del module.on_manifold
    return names


_STIEFEL: dict[str, Any] = {
    "domain": "St(N, M), U(N)",
    "kind": "any",
    "complex": True,
    "on_manifold": True,
}


@register("rgd-c-c", paper="Tagare 2011", **_STIEFEL)
@register("rgd", paper="Wisdom et al. 2016", **_STIEFEL)
class RGD(OnManifold):
    """Riemannian gradient descent: the weight itself is the parameter. Canonical metric, Cayley retraction.

    There is nothing to compute in the forward pass. The weight starts Haar-random, and :func:`cwy.optim.for_model` makes the
    optimiser that moves it, :class:`~cwy.optim.StiefelSGD`; with any other it leaves the manifold, and the first step of
    such an optimizer warns. ``with torch.no_grad(): layer.weight.copy_(Q)`` assigns a matrix. State dicts have the weight
    under its own name. An average of entries, such as ``torch.optim.swa_utils.AveragedModel``, is off the manifold:
    ``cwy.optim.for_model(averaged.module, project=True)`` brings it back.

    Args:
        n, m: the matrix is N x M.
        momentum: of the optimiser.
        batch, dtype, device: of the weight.

    Example:
        >>> layer = orthogonal(torch.nn.Linear(6, 6), method="rgd-c-c")
        >>> sorted(layer.state_dict()), orthogonality_error(layer.weight) < 1e-5
        (['bias', 'weight'], True)
    """

    rule = "sgd"
    metric, retraction = "canonical", "cayley"

    def __init__(self, n: int, m: int | None = None, *, momentum: float = 0.0, **like) -> None:
        super().__init__(n, m, **like)
        self.settings = {"metric": self.metric, "retraction": self.retraction, "momentum": momentum}


@register("rgd-e-c", paper="Likhosherstov et al. 2021", **_STIEFEL)
class RGDEC(RGD):
    """As :class:`RGD`, by the Euclidean metric and the Cayley retraction."""

    metric = "euclidean"


@register("rgd-c-qr", paper="Absil et al. 2008", **_STIEFEL)
class RGDCQR(RGD):
    """As :class:`RGD`, by the canonical metric and the QR retraction."""

    retraction = "qr"


@register("rgd-e-qr", paper="Absil et al. 2008", **_STIEFEL)
class RGDEQR(RGD):
    """As :class:`RGD`, by the Euclidean metric and the QR retraction."""

    metric, retraction = "euclidean", "qr"


@register("rgd-adam", paper="Li et al. 2020", **_STIEFEL)
class RGDAdam(OnManifold):
    """Adam on the manifold, by :class:`~cwy.optim.StiefelAdam`; else as :class:`RGD`.

    Args:
        n, m: the matrix is N x M.
        betas, eps: of the optimiser.
        batch, dtype, device: of the weight.
    """

    rule = "adam"

    def __init__(
        self,
        n: int,
        m: int | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **like,
    ) -> None:
        super().__init__(n, m, **like)
        self.settings = {"betas": tuple(betas), "eps": eps}
