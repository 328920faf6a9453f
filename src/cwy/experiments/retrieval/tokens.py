"""Turn sentences into tokens, and keep the tokens on the disk.

Tokenizing all pairs takes longer than a short run does.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ... import _atomic
from ..data.folders import tokens_root


@dataclass(frozen=True)
class Tokens:
    """Hold pairs as tokens ``(pairs, length)``, with zeros behind the end of a sentence."""

    english: Tensor
    spanish: Tensor


@dataclass(frozen=True)
class Kept:
    """Hold the tokens of all parts, as a file does.

    Attributes:
        tensors: by part and language, in int32.
        cut: the fraction of sentences that were cut.
    """

    tensors: dict[str, Tensor]
    cut: float

    def pairs(self, part: str, device: torch.device) -> Tokens:
        """Return one part on a device."""
        english = self.tensors[f"{part} english"].to(device).long()
        spanish = self.tensors[f"{part} spanish"].to(device).long()
        return Tokens(english, spanish)


class Tokenizer:
    """Turn sentences into tokens of one length, and count those that were cut."""

    def __init__(self, file: Path, length: int) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        self._tokenizer = FastTokenizer.from_file(str(file))
        self._tokenizer.enable_truncation(length)
        self._tokenizer.enable_padding(length=length)
        self.cut = 0
        self.seen = 0

    def __call__(self, texts: list[str]) -> Tensor:
        found = self._tokenizer.encode_batch_fast(texts)
        self.cut += sum(bool(one.overflowing) for one in found)
        self.seen += len(found)
        return torch.tensor([one.ids for one in found], dtype=torch.int32)


def name_of(content: bytes, tokenizer: bytes, *settings: object) -> str:
    """Return the name of the tokens that are made of these."""
    digest = hashlib.sha256(hashlib.sha256(content).digest())
    digest.update(hashlib.sha256(tokenizer).digest())
    digest.update(repr(settings).encode())
    return digest.hexdigest()[:32]


def kept(name: str) -> Kept | None:
    """Return the tokens of a name, or None if there are none that can be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(_path(name), framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return Kept(tensors, float(file.metadata()["cut"]))
    except (OSError, SafetensorError):
        return None


def keep(name: str, found: Kept) -> None:
    """Write tokens to the cache folder. A folder that can't be written to stays as it is."""
    from safetensors.torch import save

    path = _path(name)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        _atomic.write(path, save(found.tensors, {"cut": repr(found.cut)}), shared=True)


def _path(name: str) -> Path:
    return tokens_root() / f"{name}.safetensors"
