"""The tuner of our own type, and its entry in PEFT's mappings."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from peft.mapping import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_PREFIX_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
)
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn

from ._versions import announce
from .config import HOUSEHOLDER, HouseholderConfig
from .layer import HouseholderConv2d, HouseholderLayer, HouseholderLinear, OrthogonalLayer
from .together import attach, detach


class TogetherModel(BaseTuner):
    """Tune a model whose layers compute their factors once per forward pass."""

    def inject_adapter(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Create the layers of an adapter."""
        super().inject_adapter(model, *args, **kwargs)
        attach(model, OrthogonalLayer)

    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        # PEFT asks for this before each pass, and then drops the argument.
        if kwargs.get("adapter_names") is not None:
            raise NotImplementedError(
                "cwy.peft: adapter_names can't be used, because a batch has the active adapters "
                "only. Call set_adapter for each part of the batch, or export the adapters by "
                "cwy.peft.save_as_lora: PEFT's LoRA takes adapter_names."
            )
        return nullcontext()

    def _unload_and_optionally_merge(self, *args: Any, **kwargs: Any) -> Any:
        model = super()._unload_and_optionally_merge(*args, **kwargs)
        detach(self.model)
        return model


class HouseholderModel(TogetherModel):
    """Adapt a model by a :class:`HouseholderConfig`. :func:`peft.get_peft_model` creates it.

    Args:
        model: the model to adapt, changed in place.
        config: the configuration.
        adapter_name: the name of the adapter.
        low_cpu_mem_usage: create the vectors on the meta device, for loading.
    """

    prefix = "householder_"
    tuner_layer_cls = HouseholderLayer
    target_module_mapping: Any = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    def _create_and_replace(
        self,
        peft_config: HouseholderConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        if isinstance(target, HouseholderLayer):
            target.update_layer(adapter_name, peft_config)
            return
        layer = _new_layer(target, adapter_name, peft_config)
        if adapter_name not in self.active_adapters:
            # An adapter that is added to others is not trained before it is active.
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)


def _new_layer(target: nn.Module, adapter: str, config: HouseholderConfig) -> nn.Module:
    base = target
    if isinstance(target, BaseTunerLayer):
        base = target.get_base_layer()
    if isinstance(base, nn.Conv2d):
        return HouseholderConv2d(target, adapter, config)
    return HouseholderLinear(target, adapter, config)


announce(HOUSEHOLDER.value)
PEFT_TYPE_TO_CONFIG_MAPPING[HOUSEHOLDER] = HouseholderConfig
PEFT_TYPE_TO_TUNER_MAPPING[HOUSEHOLDER] = HouseholderModel
PEFT_TYPE_TO_PREFIX_MAPPING[HOUSEHOLDER] = HouseholderModel.prefix
