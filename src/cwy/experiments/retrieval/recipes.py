"""Named settings of retrieval, and the sizes of adapters with equal numbers of parameters."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ..engine.config import Config
from ..engine.task import Recipe

METHODS = ("cwy", "cwy-both", "lora", "oft", "hra", "full")
"""Ours with one and with two sides, PEFT's adapters, and fine-tuning of all weights."""

RATES = {
    "cwy": 3e-3,
    "cwy-both": 3e-3,
    "lora": 3e-3,
    "oft": 3e-3,
    "hra": 1e-2,
    "full": 1e-4,
}
"""The learning rates of Adam where none is set."""


@dataclass(frozen=True)
class RetrievalConfig(Config):
    """Hold the settings of retrieval.

    Attributes:
        iterations: training steps.
        rank: of LoRA. The other adapters get about as many parameters.
        length: tokens of a sentence. Longer ones are cut.
        temperature: by which cosine similarities are divided in the loss.
        pairs: training pairs. None is all.
        weights: the folder of the encoder. None is the installed package, or a folder of the data.
    """

    iterations: int = 300
    rank: int = field(default=8, metadata={"most": 64})
    length: int = field(default=32, metadata={"most": 512})
    temperature: float = 0.05
    pairs: int | None = None
    weights: str | None = None


def standard(method: str) -> RetrievalConfig:
    """Return 300 steps of 256 pairs, with Adam at a constant learning rate."""
    return RetrievalConfig(
        batch_size=256,
        optimizer="adam",
        lr=RATES[method],
        log_every=50,
        evaluate_every=100,
        save_every=100_000,
    )


def small(method: str) -> RetrievalConfig:
    """Return settings for a CPU: about a minute, for a first gain."""
    return replace(
        standard(method),
        batch_size=32,
        iterations=60,
        length=16,
        pairs=4000,
        log_every=10,
        evaluate_every=30,
    )


def settings_of(method: str, rank: int) -> dict[str, Any]:
    """Return the sizes of an adapter that has about as many parameters as LoRA of a rank.

    A layer has n inputs and m outputs. LoRA trains r(n + m) numbers, two-sided reflections as many,
    and one-sided reflections rn. OFT with blocks of b trains n(b - 1)/2. Over the layers of a block
    of the encoder, the inputs and the outputs add up to the same.
    """
    even = max(2, rank // 2 * 2)
    sizes: dict[str, dict[str, Any]] = {
        "cwy": {"r": 2 * rank, "sides": "in"},
        "cwy-both": {"r": even, "sides": "both"},
        "lora": {"r": rank, "lora_alpha": rank},
        # r = 0 says that the block size is given.
        "oft": {"r": 0, "oft_block_size": 4 * rank},
        "hra": {"r": 2 * rank},
        "full": {},
    }
    return sizes[method]


RECIPES: dict[str, Recipe] = {"standard": standard, "small": small}
