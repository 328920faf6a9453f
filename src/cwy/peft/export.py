r"""Export as LoRA: $P W Q - W$ has a low rank, so a LoRA holds it without loss.

With $Q = I - U T U^\top$ and $P = I - U' T' U'^\top$,
$$ P W Q - W = -(W U)\,(T U^\top) - U'\,(T' U'^\top W Q). $$
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from peft import LoraConfig, PeftModel, get_peft_model_state_dict

from ..ops import wy_factors
from .layer import OrthogonalLayer
from .vectors import times_matrix
from .weights import dense_weight

_KEPT = (
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
    "task_type",
    "base_model_name_or_path",
    "revision",
)
"""The settings that LoRA has too."""


class LowRank(NamedTuple):
    """Hold the factors of $B A$: ``a (R, in)`` and ``b (out, R)``."""

    a: Tensor
    b: Tensor


class _Wide(NamedTuple):
    """Hold U and T of $I - U T U^T$, with one column per reflection of all blocks."""

    u: Tensor
    t: Tensor


def save_as_lora(
    model: PeftModel, folder: str | Path, adapter_name: str | None = None
) -> LoraConfig:
    """Write an adapter as a LoRA adapter, which plain PEFT and inference engines load.

    The LoRA equals the adapter up to rounding. Its rank is r per side, times the number of blocks.
    Its scale is 1. Modules to save and trained biases are written too.

    Args:
        model: a model with a :class:`HouseholderConfig`, or with HRA after :func:`install`.
        folder: where ``adapter_config.json`` and ``adapter_model.safetensors`` are written.
        adapter_name: the adapter. It may be left out if one adapter is active.

    Returns:
        The configuration of the LoRA.
    """
    adapter = _adapter(model, adapter_name)
    layers = _layers(model, adapter)
    config = model.peft_config[adapter]
    state = _other_state(model, adapter)
    ranks = set()
    transposed = False
    for name, layer in layers.items():
        low_rank = lora_factors(layer, adapter)
        ranks.add(low_rank.a.shape[0])
        transposed = transposed or isinstance(layer.get_base_layer(), Conv1D)
        shaped = _as_convolutions(layer.get_base_layer(), low_rank)
        state[f"{name}.lora_A.weight"] = shaped.a.float().contiguous().cpu()
        state[f"{name}.lora_B.weight"] = shaped.b.float().contiguous().cpu()
    (rank,) = ranks
    lora = _lora_config(config, rank, transposed)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    lora.save_pretrained(str(folder))
    return lora


def lora_factors(layer: OrthogonalLayer, adapter: str) -> LowRank:
    """Compute the factors of $P W Q - W$ for the weight of a layer, in float64."""
    weight = dense_weight(layer.get_base_layer()).double()
    parts = []
    into = layer.product(adapter, "in")
    out = layer.product(adapter, "out")
    turned = weight
    if into is not None:
        wide = _wide_factors(into.vectors)
        parts.append(LowRank(wide.t @ wide.u.mT, -weight @ wide.u))
        turned = times_matrix(weight, into.vectors.detach().double())
    if out is not None:
        wide = _wide_factors(out.vectors)
        parts.append(LowRank(wide.t @ (wide.u.mT @ turned), -wide.u))
    a = torch.cat([part.a for part in parts], 0)
    b = torch.cat([part.b for part in parts], 1)
    return LowRank(a, b)


def _wide_factors(v: Tensor) -> _Wide:
    """Return U and T in float64. Those of blocks are block-diagonal."""
    u, t = wy_factors(v.detach().double())
    if v.dim() == 2:
        return _Wide(u, t)
    return _Wide(torch.block_diag(*u), torch.block_diag(*t))


def _as_convolutions(base: nn.Module, low_rank: LowRank) -> LowRank:
    """Return factors in the shape of a LoRA's weights: kernels, if the layer is a convolution."""
    if not isinstance(base, nn.Conv2d):
        return low_rank
    if any(step != 1 for step in base.dilation) or base.padding_mode != "zeros":
        raise NotImplementedError(
            f"save_as_lora: PEFT's LoRA ignores dilation={base.dilation} and padding_mode="
            f"{base.padding_mode!r} of a convolution. Leave it out with exclude_modules, or merge "
            "the adapter."
        )
    kernel = base.weight.shape[1:]
    return LowRank(low_rank.a.reshape(-1, *kernel), low_rank.b[..., None, None])


def _adapter(model: PeftModel, name: str | None) -> str:
    """Return the name of the adapter to write, or raise."""
    if not isinstance(model, PeftModel):
        raise TypeError(f"save_as_lora: expected a peft.PeftModel, got {type(model).__name__}.")
    known = list(model.peft_config)
    if name is None:
        active = model.active_adapters
        if len(active) != 1:
            raise ValueError(
                f"save_as_lora: {len(active)} adapters are active: {active}. Pass adapter_name."
            )
        name = active[0]
    if name not in known:
        raise ValueError(f"save_as_lora: there is no adapter {name!r}. Known: {known}.")
    return name


def _layers(model: PeftModel, adapter: str) -> dict[str, OrthogonalLayer]:
    """Return the layers of an adapter by their names, or raise if there are none."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, OrthogonalLayer) and module.has(adapter):
            if module.merged:
                raise ValueError(
                    f"save_as_lora: an adapter is merged into {name}. Call unmerge_adapter() first."
                )
            found[name] = module
    if not found:
        kind = model.peft_config[adapter].peft_type
        raise ValueError(
            f"save_as_lora: adapter {adapter!r} is a {kind}, without layers of cwy.peft. Use a "
            "HouseholderConfig, or cwy.peft.install() before HRA is created."
        )
    return found


def _other_state(model: PeftModel, adapter: str) -> dict[str, Tensor]:
    """Return what an adapter saves besides its vectors: modules to save, and trained biases."""
    # The embeddings are frozen, also if an adapter turns them.
    state = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    prefix = model.base_model.prefix
    return {
        name: x.detach().cpu().contiguous().clone()  # PEFT has some under two names
        for name, x in state.items()
        if f".{prefix}" not in name
    }


def _lora_config(config: Any, rank: int, transposed: bool) -> LoraConfig:
    """Return the configuration of a LoRA of a rank, with a scale of 1."""
    kept = {name: getattr(config, name) for name in _KEPT}
    bias = config.bias
    if bias.endswith("_only"):
        bias = "lora_only"
    return LoraConfig(
        r=rank,
        lora_alpha=rank,
        bias=bias,
        fan_in_fan_out=transposed,
        inference_mode=True,
        **kept,
    )
