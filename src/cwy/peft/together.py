"""The factors of all adapters of a model, computed once per forward pass in one batched call.

Layers of one shape share a group. The first layer that needs its factors computes those of the
whole group. Every forward pass computes them anew. The replay of a CUDA graph changes parameters
without a trace, so no pass can know that the factors of another one still hold. Only if a
checkpoint runs layers again in the backward pass do they stay here, for as long as the vectors do
not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import backward_number, own_parameter, saved_tensors_are_packed
from ..ops.reflect.eager import factors_of
from ..ops.reflect.factors import Factors, factor_dtype
from .vectors import orthonormal

PLAIN = (Tensor, nn.Parameter)
"""The types of parameters that have no behavior of their own."""


class Product:
    """Describe one product of reflections: the vectors of an adapter on one side of a layer.

    Args:
        holder: the parameters of all adapters of the layer.
        adapter: the name of the adapter.
        orthonormal: whether the vectors are made orthonormal first.
    """

    def __init__(self, holder: nn.ParameterDict, adapter: str, orthonormal: bool) -> None:
        self._holder = holder
        self.adapter = adapter
        self.orthonormal = orthonormal

    @property
    def parameter(self) -> Tensor:
        """Return the vectors as they are trained and saved."""
        parameter = own_parameter(self._holder, self.adapter)
        assert parameter is not None
        return parameter

    @property
    def vectors(self) -> Tensor:
        """Return the vectors of the reflections."""
        if self.orthonormal:
            return orthonormal(self.parameter)
        return self.parameter


class _Mode(NamedTuple):
    """Describe what factors are computed for."""

    dtype: torch.dtype
    recording: bool
    inference: bool


@dataclass
class _Computed:
    """Hold factors of a group, and the parameters that they were computed from."""

    factors: Sequence[Factors]
    parameters: Sequence[Tensor]
    versions: Sequence[tuple[int, int]]

    def fits(self, place: int, parameter: Tensor) -> bool:
        """Return whether a parameter is still the one that was used, with the same values."""
        if self.parameters[place] is not parameter:
            return False
        return self.versions[place] == _version(parameter)


class _Group:
    """Hold products of one shape, dtype and device."""

    def __init__(self) -> None:
        self.members: list[Product] = []
        self.computed: dict[_Mode, _Computed] = {}

    def compute(self, mode: _Mode) -> _Computed | None:
        """Compute the factors of all members, or return None if they are not alike any more."""
        parameters = [member.parameter for member in self.members]
        if len({_kind(parameter) for parameter in parameters}) > 1:
            return None
        with torch.set_grad_enabled(mode.recording):
            vectors = parameters
            if self.members[0].orthonormal:
                # One by one: a stack would give a gradient of zeros to layers without one.
                vectors = [orthonormal(parameter) for parameter in parameters]
            factors = factors_of(vectors, mode.dtype)
        computed = _Computed(factors, parameters, [_version(one) for one in parameters])
        self.computed[mode] = computed
        return computed


class Together:
    """Compute the factors of the adapters of one model, once per forward pass."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._places: dict[Product, tuple[_Group, int]] = {}
        self._is_stale = True
        self._is_checkpointed = False
        self._depth = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Together:
        """Return an empty one. It belongs to a copy of the model."""
        twin = Together()
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return Together, ()

    def renew(self) -> None:
        """Find the layers again before the next forward pass."""
        self._is_stale = True

    def enter(self, model: nn.Module, given: tuple[Any, ...]) -> None:
        """Begin a forward pass of the model."""
        if torch.compiler.is_compiling():
            return
        self._depth += 1
        if self._depth > 1:
            return
        if self._is_stale:
            self._find(model)
        self._is_checkpointed = False
        self._forget()

    def exit(self, model: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        """End a forward pass, also after an error."""
        if torch.compiler.is_compiling():
            return
        self._depth = max(0, self._depth - 1)
        if self._depth > 0:
            return
        # During a capture the memory belongs to the graph, so nothing else may read it.
        if _is_captured() or not self._is_checkpointed:
            self._forget()

    def _forget(self) -> None:
        """Drop all factors."""
        for group in self._groups:
            group.computed.clear()

    def _find(self, model: nn.Module) -> None:
        """Put the products of all layers of the model into groups."""
        groups: dict[Any, _Group] = {}
        self._places = {}
        for layer in model.modules():
            if getattr(layer, "together", None) is not self:
                continue
            for product in layer.products():  # pyrefly: ignore[not-callable]
                parameter = product.parameter
                if type(parameter) not in PLAIN or parameter.is_inference():
                    continue
                key = (product.adapter, product.orthonormal, _kind(parameter))
                group = groups.setdefault(key, _Group())
                self._places[product] = (group, len(group.members))
                group.members.append(product)
        self._groups = list(groups.values())
        self._is_stale = False

    def factors(self, product: Product, parameter: Tensor, dtype: torch.dtype) -> Factors | None:
        """Return the factors of a product, or None if the layer must compute them by itself."""
        is_recomputed = backward_number() >= 0
        if self._depth == 0 and not is_recomputed:
            return None
        found = self._places.get(product)
        if found is None:
            self._is_stale = True
            return None
        group, place = found
        recording = parameter.requires_grad and torch.is_grad_enabled()
        mode = _Mode(dtype, recording, torch.is_inference_mode_enabled())
        computed = group.computed.get(mode)
        if computed is None or not computed.fits(place, parameter):
            if is_recomputed:
                return None
            computed = group.compute(mode)
            if computed is None:
                self._is_stale = True
                return None
        if recording and saved_tensors_are_packed():
            self._is_checkpointed = True
        return computed.factors[place]


def find_factors(x: Tensor, product: Product, together: Together | None) -> Factors | None:
    """Return the factors for activations of the dtype of x, or None for a special parameter."""
    parameter = product.parameter
    if type(parameter) not in PLAIN:
        return None
    dtype = factor_dtype(parameter, x.dtype)
    if together is not None:
        factors = together.factors(product, parameter, dtype)
        if factors is not None:
            return factors
    return factors_of([product.vectors], dtype)[0]


def attach(model: nn.Module, layers: type[Any]) -> None:
    """Let the adapter layers of a model compute their factors together."""
    together = _attached(model)
    if together is None:
        together = Together()
        model.register_forward_pre_hook(together.enter)
        model.register_forward_hook(together.exit, always_call=True)
    together.renew()
    for layer in model.modules():
        if isinstance(layer, layers):
            layer.together = together


def detach(model: nn.Module) -> None:
    """Remove what :func:`attach` added to a model."""
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), Together):
                del hooks[key]
    for key in list(model._forward_hooks_always_called):
        if key not in model._forward_hooks:
            del model._forward_hooks_always_called[key]


def _attached(model: nn.Module) -> Together | None:
    for hook in model._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Together):
            return owner
    return None


def _is_captured() -> bool:
    """Return whether a CUDA graph is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _version(parameter: Tensor) -> tuple[int, int]:
    """Return numbers that change when a parameter is written to."""
    return parameter._version, parameter.data_ptr()


def _kind(parameter: Tensor) -> tuple[Any, ...]:
    """Return what parameters of one group have in common."""
    return parameter.shape, parameter.dtype, parameter.device, parameter.requires_grad
