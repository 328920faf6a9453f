"""Register a map with ``torch.nn.utils.parametrize``, so that an access costs little."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList

from .._torch import has_hooks, own_child, own_parameter, parametrizations_are_cached
from .base import OrthogonalMap


class Chain(ParametrizationList):
    """Hold the parametrizations of a weight, as torch's list does.

    Its call is shorter for one map of one tensor: torch's list looks for a second map by an
    attribute that is not there, in each call.
    """

    def forward(self) -> Tensor:
        if torch.compiler.is_compiling() or len(self) != 1 or not self.is_tensor:
            return super().forward()
        chart = own_child(self, "0")
        free = own_parameter(self, "original")
        if chart is None or free is None:
            return super().forward()
        return chart(free)

    def plain_map(self) -> OrthogonalMap | None:
        """Return the map if a caller may compute it by itself, for the same weight as a call's.

        None if there are several maps or tensors, if hooks watch the calls, if torch keeps the
        weight (``parametrize.cached``), or if it is computed together with others. A checkpointed
        region must call instead, because its recomputation gets the weight that it used.
        """
        if len(self) != 1 or not self.is_tensor or parametrizations_are_cached():
            return None
        chart = own_child(self, "0")
        if not isinstance(chart, OrthogonalMap) or chart.given is not None:
            return None
        if chart.stack is not None and chart.stack.serves:
            return None
        if has_hooks(self) or has_hooks(chart):
            return None
        return chart


def own_chain(module: nn.Module, name: str) -> Chain | None:
    """Return the parametrizations of a module's tensor if :func:`register` made them."""
    chains = own_child(module, "parametrizations")
    if chains is None:
        return None
    chain = own_child(chains, name)
    if isinstance(chain, Chain):
        return chain
    return None


def register(module: nn.Module, name: str, chart: nn.Module) -> None:
    """Register a map as the only parametrization of a module's tensor."""
    parametrize.register_parametrization(module, name, chart)
    chains = cast(nn.ModuleDict, module.parametrizations)
    chains[name].__class__ = Chain
