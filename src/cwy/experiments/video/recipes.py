"""Named settings of video prediction.

Those of the paper are never edited: a change gets a new name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ..data import kth, weizmann
from ..engine.config import Config
from ..engine.task import Recipe

METHODS = (
    "tcwy",
    "own",
    "rgd-c-c",
    "rgd-e-c",
    "rgd-c-qr",
    "rgd-e-qr",
    "rgd-adam",
    "orth-init",
    "glorot",
    "zeros",
    "convlstm",
)
"""The designs of the recurrent unit that Table 4 compares."""


@dataclass(frozen=True)
class VideoConfig(Config):
    """Hold the settings of video prediction.

    Attributes:
        action: which of the set's actions, or "all" for Moving MNIST.
        epochs: passes over the training sequences.
        channels: of the first and last recurrent unit. The inner ones have two and four times as
            many.
        kernel_size: q.
        bucket: batches are padded to a multiple of this many steps, so that few graphs serve all.
        test_batch_size: sequences per batch of an evaluation.
        eager: run step by step without CUDA graphs or an analytic backward pass, for comparison.
    """

    action: str = "all"
    epochs: int = 150
    batch_size: int = 3
    channels: int = 32
    kernel_size: int = 3
    bucket: int = 16
    test_batch_size: int = 16
    eager: bool = False
    optimizer: str = "adam"
    lr: float = 1e-3
    orthogonal_lr: float = 1e-3
    log_every: int = 20
    save_every: int = 500


def paper(method: str, action: str) -> VideoConfig:
    """Return the paper's settings: batch 3, q = 3, learning rate 1e-3, 150 epochs.

    The learning rate of ``rgd-adam`` is the length of a step in the Frobenius norm. A step of Adam
    by 1e-3 per entry has length 0.1.
    """
    if method == "rgd-adam":
        return VideoConfig(action=action, orthogonal_lr=0.1)
    return VideoConfig(action=action, orthogonal_lr=1e-3)


def small(method: str, action: str) -> VideoConfig:
    """Return settings for minutes on a CPU."""
    return replace(
        paper(method, action),
        channels=8,
        epochs=2,
        batch_size=16,
        test_batch_size=100,
        save_every=50,
    )


def _named(recipes: dict[str, Recipe]) -> dict[str, Recipe]:
    """Return each recipe, and again with its method's name before its own."""
    prefixed = {
        f"{method}-{name}": recipe for method in METHODS for name, recipe in recipes.items()
    }
    return recipes | prefixed


KTH_RECIPES = _named({action: partial(paper, action=action) for action in kth.ACTIONS})
WEIZMANN_RECIPES = _named({action: partial(paper, action=action) for action in weizmann.ACTIONS})
MOVING_RECIPES = _named(
    {"digits": partial(paper, action="all"), "small": partial(small, action="all")}
)
