"""PEFT's HRA on the ops of this library: the same configuration, keys and results."""

from __future__ import annotations

import inspect
from types import TracebackType
from typing import Any

from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.hra import HRAConv2d as PeftConv2d
from peft.tuners.hra import HRALayer as PeftLayer
from peft.tuners.hra import HRALinear as PeftLinear
from peft.tuners.hra import HRAModel as PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import PeftType
from torch import Tensor, nn

from ..ops import cwy_matrix
from .layer import OrthogonalConv2d, OrthogonalLayer, OrthogonalLinear
from .model import TogetherModel
from .together import Product


class HRALayer(OrthogonalLayer):
    """Serve both layers of HRA. PEFT's own layer holds the parameters."""

    hra_u: nn.ParameterDict
    hra_apply_GS: dict[str, bool]
    _products: dict[str, Product]

    def product(self, adapter: str, side: str) -> Product | None:
        """Return the product of an adapter on a side. HRA has only the input side."""
        if side == "out":
            return None
        product = self._products.get(adapter)
        if product is None and adapter in self.hra_u:
            product = Product(self.hra_u, adapter, orthonormal=self.hra_apply_GS[adapter])
            self._products[adapter] = product
        return product

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Add an adapter, or replace it."""
        # PEFT's constructor comes here before any other line of this class runs.
        self.__dict__.setdefault("_products", {}).pop(adapter_name, None)
        super().update_layer(adapter_name, *args, **kwargs)  # pyrefly: ignore
        if self.together is not None:
            self.together.renew()

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter."""
        self._products.pop(adapter_name, None)
        super().delete_adapter(adapter_name)

    def get_delta_weight(self, adapter_name: str, reverse: bool = False) -> Tensor:
        """Return the orthogonal matrix of an adapter, or its inverse, as PEFT's HRA does."""
        product = self.product(adapter_name, "in")
        assert product is not None
        matrix = cwy_matrix(product.vectors)
        if reverse:
            return matrix.mT
        return matrix


class HRALinear(HRALayer, OrthogonalLinear, PeftLinear):
    """Adapt a linear layer by HRA."""


class HRAConv2d(HRALayer, OrthogonalConv2d, PeftConv2d):
    """Adapt a convolution by HRA."""


# From PEFT 0.19 on, layers take their configuration.
_TAKES_CONFIG = "config" in inspect.signature(PeftLinear.__init__).parameters


class HRAModel(TogetherModel, PeftModel):
    """Run PEFT's tuner of HRA with our layers."""

    tuner_layer_cls = PeftLayer

    @staticmethod
    def _create_new_module(hra_config: Any, adapter_name: str, target: Any, **kwargs: Any) -> Any:
        base = target
        if isinstance(target, BaseTunerLayer):
            base = target.get_base_layer()
        if _TAKES_CONFIG:
            kwargs["config"] = hra_config
        if isinstance(base, nn.Conv2d):
            return HRAConv2d(target, adapter_name, **kwargs)
        return HRALinear(target, adapter_name, **kwargs)


class _Installed:
    """Restore, at the end of a ``with`` block, what was before :func:`install`."""

    def __init__(self, before: type[Any]) -> None:
        self._before = before

    def __enter__(self) -> _Installed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        PEFT_TYPE_TO_TUNER_MAPPING[PeftType.HRA] = self._before


def install() -> _Installed:
    """Make PEFT's HRA run on the ops of this library.

    From then on ``get_peft_model(model, HRAConfig(...))`` and ``PeftModel.from_pretrained`` create
    our layers. Configurations and checkpoints stay the same. Models that exist, and direct uses of
    ``peft.HRAModel``, stay PEFT's.

    With ``apply_GS`` a vector that depends on those before it counts as no reflection. PEFT divides
    rounding noise by its norm there, as with the paired start of ``init_weights=True``.

    Returns:
        A context manager. Its end restores the tuner that was there before.

    Example:
        >>> import peft
        >>> from cwy.peft import install
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        >>> with install():
        ...     model = peft.get_peft_model(model, peft.HRAConfig(r=2, target_modules=["0"]))
        >>> type(model.base_model).__module__
        'cwy.peft.hra'
    """
    before = PEFT_TYPE_TO_TUNER_MAPPING[PeftType.HRA]
    PEFT_TYPE_TO_TUNER_MAPPING[PeftType.HRA] = HRAModel
    return _Installed(before)


def uninstall() -> None:
    """Give HRA back to PEFT. Models that :func:`install` made keep our layers."""
    PEFT_TYPE_TO_TUNER_MAPPING[PeftType.HRA] = PeftModel
