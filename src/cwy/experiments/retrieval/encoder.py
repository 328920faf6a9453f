"""The encoder with an adapter: sentences in, unit vectors out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from ...api import orthogonality_error
from ...ops import cwy_matrix
from .recipes import settings_of

TARGETS = [
    "query",
    "key",
    "value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
]
"""Every linear layer of the encoder's blocks."""


class Encoder(nn.Module):
    """Map tokens to unit vectors: the mean of the last states of a sentence, normalized."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``(R, 384)`` for tokens ``(R, length)``."""
        mask = tokens != 0
        states = self.body(input_ids=tokens, attention_mask=self._added(mask))[0].float()
        weights = mask.to(states.dtype).unsqueeze(-1)
        return normalize((states * weights).sum(1) / weights.sum(1), dim=-1)

    def _added(self, mask: Tensor) -> Tensor:
        """Return ``(R, 1, 1, length)``, which is added to the attention's scores.

        The encoder makes the same of a mask, but copies a number from the host for it. A CUDA
        graph can't hold that.
        """
        dtype = next(self.body.parameters()).dtype
        added = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        return added[:, None, None, :]


def adapt(body: nn.Module, method: str, rank: int) -> nn.Module:
    """Return the encoder with the adapter of a method, or with all weights trained."""
    if method == "full":
        return body
    from peft import HRAConfig, LoraConfig, OFTConfig, get_peft_model

    from ...peft import HouseholderConfig

    kinds: dict[str, Any] = {
        "cwy": HouseholderConfig,
        "cwy-both": HouseholderConfig,
        "lora": LoraConfig,
        "oft": OFTConfig,
        "hra": HRAConfig,
    }
    config = kinds[method](target_modules=list(TARGETS), **settings_of(method, rank))
    return get_peft_model(body, config)


def trained_parameters(model: nn.Module) -> int:
    """Count the numbers that are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@torch.no_grad()
def worst_orthogonality(model: nn.Module) -> float | None:
    """Return the largest orthogonality error of the adapters, None if they are not orthogonal.

    The matrices are formed in the dtype of their parameters, under autocast, too.
    """
    device = next(model.parameters()).device
    with torch.autocast(device.type, enabled=False):
        return max(_orthogonality_errors(model), default=None)


def _orthogonality_errors(model: nn.Module) -> list[float]:
    errors = []
    for name, layer in model.named_modules():
        if name.endswith(("householder_in", "householder_out")):
            errors += [orthogonality_error(cwy_matrix(v)) for v in layer.parameters()]
        elif hasattr(layer, "hra_u") or hasattr(layer, "oft_R"):
            delta: Any = layer.get_delta_weight  # pyrefly: ignore
            errors.append(orthogonality_error(delta("default")))
    return errors
