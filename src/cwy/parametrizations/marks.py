"""Mark the weights that live on the manifold, where the weight itself is the parameter."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from .._torch import own_child, own_parameter
from ..ops._linalg import double, nearest_orthogonal
from . import _foreign_steps
from .base import OrthogonalMap


class OnManifold(OrthogonalMap):
    """Mark a weight that lives on the manifold, with the optimizer that moves it and how."""

    rule: ClassVar[Literal["sgd", "adam"]]
    settings: dict[str, Any]
    _owner: weakref.ref[nn.Module] | None = None
    _name: str = ""

    def parameter(self) -> Tensor | None:
        """Return the parameter that this map marks, or None if its module is gone or was baked."""
        owner = self._module()
        if owner is None or on_manifold(owner).get(self._name) is not self:
            return None
        return own_parameter(owner, self._name)

    def mark(self, owner: nn.Module, name: str) -> None:
        """Mark a parameter of a module, so that a step of an optimizer of another kind warns."""
        # A strong reference would close a cycle. Then the module's memory would wait for the
        # garbage collector.
        self._owner = weakref.ref(owner)
        self._name = name
        _foreign_steps.watch(self)

    def _module(self) -> nn.Module | None:
        """Return the module of the marked parameter, or None if it is gone or nothing is marked."""
        if self._owner is None:
            return None
        return self._owner()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owner": self._module()}

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
        # LAPACK has no half precision.
        dtype = torch.promote_types(self.dtype, torch.float32)
        q, r = torch.linalg.qr(
            torch.randn(*self.batch, self.n, self.m, dtype=dtype, device=self.device)
        )
        return (q * r.diagonal(dim1=-2, dim2=-1).sgn().unsqueeze(-2)).to(self.dtype)

    def extra_repr(self) -> str:
        settings = [f"{key}={value!r}" for key, value in self.settings.items()]
        return ", ".join([super().extra_repr(), *settings])


def keep(module: nn.Module, name: str, chart: OnManifold) -> None:
    """Mark a module's parameter as one that lives on the manifold.

    The map becomes a child of the module, without state, and goes where the module goes.
    """
    module.on_manifold = nn.ModuleDict({**on_manifold(module), name: chart})
    chart.mark(module, name)


def on_manifold(module: nn.Module) -> dict[str, OnManifold]:
    """Return the maps of a module's own parameters on the manifold, by the parameter's name."""
    kept = own_child(module, "on_manifold")
    if not isinstance(kept, nn.ModuleDict):
        return {}
    return {name: chart for name, chart in kept.items() if isinstance(chart, OnManifold)}


def release(module: nn.Module, name: str) -> None:
    """Take the mark off a module's parameter."""
    marks = cast(nn.ModuleDict, module.on_manifold)
    del marks[name]
    if not marks:
        del module.on_manifold
