"""Adapter layers: what our own type and HRA share, and the layers of our own type."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn
from torch.func import functional_call

from .._torch import (
    has_hooks,
    own_child,
    own_parameter,
    saved_tensors_are_packed,
    transform_is_active,
)
from ..ops import reflect
from ..ops._precision import autocast_dtype
from ..ops.reflect.eager import adapted_linear, multiply
from ..ops.reflect.product import is_left_by_autocast
from .config import HouseholderConfig
from .together import PLAIN, Product, Together, find_factors
from .vectors import matrix_times, paired_vectors, times_matrix
from .weights import dense_weight, features, write_weight


class OrthogonalLayer(BaseTunerLayer):
    """Use a layer's weight W as P W Q, with one product per active adapter and side.

    Subclasses are modules with a ``base_layer``. They define :meth:`product`.
    """

    base_layer: nn.Module
    together: Together | None = None

    def product(self, adapter: str, side: str) -> Product | None:
        """Return the product of an adapter on a side, "in" or "out", or None if it has none."""
        raise NotImplementedError

    def products(self) -> Iterator[Product]:
        """Return the products of all adapters."""
        for adapter in self._get_available_adapters():
            for side in ("in", "out"):
                product = self.product(adapter, side)
                if product is not None:
                    yield product

    def has(self, adapter: str) -> bool:
        """Return whether the layer has an adapter of this name."""
        return adapter in self._get_available_adapters()

    def rotated(self, weight: Tensor, adapter: str, adjoint: bool = False) -> Tensor:
        """Return P W Q for a matrix W ``(out, in)``, or its inverse map, which undoes it."""
        into = self.product(adapter, "in")
        if into is not None:
            weight = times_matrix(weight, into.vectors, adjoint)
        out = self.product(adapter, "out")
        if out is not None:
            weight = matrix_times(out.vectors, weight, adjoint)
        return weight

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Return what merging an adapter adds to the weight, as a matrix ``(out, in)``."""
        weight = dense_weight(self.get_base_layer())
        return self.rotated(weight, adapter) - weight

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Multiply the weight by the products of adapters.

        Args:
            safe_merge: raise if the result has NaN or infinite entries, before anything is changed.
            adapter_names: the adapters, by default the active ones.
        """
        for adapter in check_adapters_to_merge(cast(Any, self), adapter_names):
            if not self.has(adapter):
                continue
            base = self.get_base_layer()
            with torch.no_grad():
                weight = self.rotated(dense_weight(base), adapter)
            if safe_merge and not weight.isfinite().all():
                raise ValueError(
                    f"NaNs detected in the merged weights. The adapter {adapter} seems to be broken"
                )
            write_weight(base, weight)
            self.merged_adapters.append(adapter)

    def unmerge(self) -> None:
        """Undo every merge, the last one first."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        while self.merged_adapters:
            adapter = self.merged_adapters.pop()
            if self.has(adapter):
                base = self.get_base_layer()
                with torch.no_grad():
                    write_weight(base, self.rotated(dense_weight(base), adapter, adjoint=True))

    def is_plain(self) -> bool:
        """Return whether the base layer alone computes the result."""
        if self.disable_adapters:
            if self.merged:
                self.unmerge()
            return True
        return self.merged

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter."""
        super().delete_adapter(adapter_name)
        if self.together is not None:
            self.together.renew()

    def scale_layer(self, scale: float) -> None:
        """Warn unless the scale is 1, because a product of reflections has no scale."""
        if scale != 1:
            warnings.warn("An orthogonal adapter has no scale. It stays at 1.", stacklevel=2)

    def unscale_layer(self, scale: float | None = None) -> None:
        """Do nothing, because a product of reflections has no scale."""


class OrthogonalLinear(OrthogonalLayer):
    """Run the forward pass of linear layers.

    It calls the base layer without reading its weight. Only a frozen ``nn.Linear`` without hooks is
    not called: its product is part of one node of autograd with those of the adapter.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the base layer makes of Q x, multiplied by P. The bias stays as it is."""
        base = own_child(cast(nn.Module, self), "base_layer")
        assert base is not None
        if self.is_plain():
            return base(x, *args, **kwargs)
        adapters = self.active_adapters
        if len(adapters) == 1 and not args and not kwargs:
            y = self._at_once(x, base, adapters[0])
            if y is not None:
                return y
        for adapter in reversed(adapters):
            product = self.product(adapter, "in")
            if product is not None:
                x = map_activations(_as_autocast(x), product, self.together)
        y = base(x, *args, **kwargs)
        for adapter in adapters:
            product = self.product(adapter, "out")
            if product is not None:
                bias = getattr(self.get_base_layer(), "bias", None)
                y = map_activations(y, product, self.together, bias)
        return y

    def _at_once(self, x: Tensor, base: nn.Module, adapter: str) -> Tensor | None:
        """Return the result from one node of autograd, or None if the parts must run apart."""
        into = self.product(adapter, "in")
        if into is None or not _is_plain_eager():
            return None
        x = _as_autocast(x)
        frozen = _frozen_linear(base, x)
        if frozen is None:
            return None
        factors = find_factors(x, into, self.together)
        out_factors = None
        out = self.product(adapter, "out")
        if out is not None:
            out_factors = find_factors(x, out, self.together)
        if factors is None or (out is not None and out_factors is None):
            return None
        return adapted_linear(x, factors, out_factors, frozen.weight, frozen.bias)


class OrthogonalConv2d(OrthogonalLayer):
    """Run the forward pass of convolutions: multiply the kernel, as a matrix."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the convolution by the kernel P W Q."""
        base = self.get_base_layer()
        if self.is_plain():
            return base(x, *args, **kwargs)
        kernel = cast(Tensor, base.weight)
        weight = kernel.flatten(1)
        for adapter in self.active_adapters:
            weight = self.rotated(weight, adapter)
        return functional_call(base, {"weight": weight.view(kernel.shape)}, (x, *args), kwargs)


def map_activations(
    x: Tensor, product: Product, together: Together | None, bias: Tensor | None = None
) -> Tensor:
    """Map each vector of x by the matrix Q of a product, or by Q(x - b) + b with a bias b."""
    if _is_plain_eager():
        factors = find_factors(x, product, together)
        if factors is not None:
            return multiply(x, factors, bias)
    if bias is None:
        return reflect(x, product.vectors)
    bias = bias.to(x.dtype)
    return reflect(x - bias, product.vectors) + bias


def _is_plain_eager() -> bool:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return not transform_is_active()


class _Frozen(NamedTuple):
    """Hold the parameters of a linear layer that have no gradient."""

    weight: Tensor
    bias: Tensor | None


def _frozen_linear(base: nn.Module, x: Tensor) -> _Frozen | None:
    """Return the parameters of a frozen layer, or None if it does more than one product with x."""
    if type(base) is not nn.Linear or not _is_untouched(base):
        return None
    weight = own_parameter(base, "weight")
    bias = own_parameter(base, "bias")
    if bias is None and base.bias is not None:
        # It is not a parameter.
        return None
    if weight is None or not _is_frozen(weight, x) or not is_left_by_autocast(x):
        return None
    if bias is not None and not _is_frozen(bias, x):
        return None
    return _Frozen(weight, bias)


_LINEAR_FORWARD = nn.Linear.forward


def _is_untouched(base: nn.Linear) -> bool:
    """Return whether no tool changes or watches what a layer does."""
    if "forward" in base.__dict__ or nn.Linear.forward is not _LINEAR_FORWARD:
        return False
    # The saved tensors of a checkpoint must not depend on hooks, which may differ when it runs
    # again.
    return not has_hooks(base) and not saved_tensors_are_packed()


def _is_frozen(parameter: Tensor, x: Tensor) -> bool:
    """Return whether a parameter is plain, has no gradient, and is in the dtype of x."""
    if type(parameter) not in PLAIN or parameter.requires_grad:
        return False
    return parameter.dtype == x.dtype


def _as_autocast(x: Tensor) -> Tensor:
    """Return x in autocast's dtype, to which the base layer would convert it."""
    if x.dtype != torch.float32:
        return x
    return x.to(autocast_dtype(x))


class HouseholderLayer(OrthogonalLayer):
    """Serve all layers of a :class:`HouseholderConfig`."""

    adapter_layer_names = ("householder_in", "householder_out")
    other_param_names = ("householder_r", "householder_blocks")

    def __init__(self, base_layer: nn.Module, adapter: str, config: HouseholderConfig) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.householder_in = nn.ParameterDict({})
        self.householder_out = nn.ParameterDict({})
        self.householder_r: dict[str, int] = {}
        self.householder_blocks: dict[str, int | None] = {}
        self._products: dict[tuple[str, str], Product] = {}
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        size = features(self.get_base_layer())
        self.in_features = size.into
        self.out_features = size.out
        self._active_adapter = adapter
        self.update_layer(adapter, config)

    def product(self, adapter: str, side: str) -> Product | None:
        """Return the product of an adapter on a side, "in" or "out", or None if it has none."""
        return self._products.get((adapter, side))

    def update_layer(self, adapter: str, config: HouseholderConfig) -> None:
        """Add an adapter, or replace it."""
        sizes = {"in": self.in_features, "out": self.out_features}
        if config.sides != "both":
            sizes = {config.sides: sizes[config.sides]}
        for side, size in sizes.items():
            _check_blocks(side, size, config.blocks)
        self.householder_r[adapter] = config.r
        self.householder_blocks[adapter] = config.blocks
        for side, size in sizes.items():
            vectors = paired_vectors(size, config.r, config.blocks, config.init_weights)
            holder = self._holder(side)
            holder[adapter] = nn.Parameter(vectors)
            self._products[adapter, side] = Product(holder, adapter, orthonormal=False)
        self._move_adapter_to_device_of_base_layer(adapter)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)
        if self.together is not None:
            self.together.renew()

    def _holder(self, side: str) -> nn.ParameterDict:
        if side == "in":
            return self.householder_in
        return self.householder_out

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter."""
        for side in ("in", "out"):
            self._products.pop((adapter_name, side), None)
        super().delete_adapter(adapter_name)

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Return True, because P W Q - W has a low rank."""
        return True

    def __repr__(self) -> str:
        return "householder." + super().__repr__()


class HouseholderLinear(OrthogonalLinear, HouseholderLayer, nn.Module):
    """Adapt a linear layer by products of reflections on its sides."""


class HouseholderConv2d(OrthogonalConv2d, HouseholderLayer, nn.Module):
    """Adapt a convolution by products of reflections on the sides of its kernel, as a matrix."""


def _check_blocks(side: str, size: int, blocks: int | None) -> None:
    if blocks is not None and size % blocks:
        raise ValueError(
            f"HouseholderConfig: blocks={blocks} does not divide the {size} features of a layer's "
            f"{side} side. Choose a divisor, or leave out that layer with exclude_modules."
        )
