"""Named settings of pixel-by-pixel MNIST.

Those of the paper are never edited: a change gets a new name.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.task import Recipe
from ..recurrent import RecurrentConfig, start


@dataclass(frozen=True)
class PixelsConfig(RecurrentConfig):
    """Hold the settings of pixel-by-pixel MNIST.

    Attributes:
        epochs: passes over the training images.
        pool: side of the squares of pixels that are averaged. 1 leaves the images as they are.
        test_batch_size: images per batch of an evaluation.
    """

    epochs: int = 70
    pool: int = 1
    test_batch_size: int = 2000


def paper(method: str, hidden_size: int) -> PixelsConfig:
    """Return the paper's settings: batch 128, 70 epochs.

    The transition starts at exp of Helfrich's skew matrix, or its Cayley transform for scornn.
    """
    init = "helfrich-exp"
    if method == "scornn":
        init = "helfrich"
    return PixelsConfig(
        hidden_size=hidden_size,
        lr=7e-4,
        orthogonal_lr=7e-5,
        log_every=67,
        save_every=469 * 5,
        **start(method, init),
    )


def small(method: str) -> PixelsConfig:
    """Return settings for images of 7 x 7: a minute on a CPU."""
    return PixelsConfig(
        hidden_size=64,
        epochs=3,
        pool=4,
        lr=2e-3,
        orthogonal_lr=2e-4,
        log_every=67,
        save_every=469,
        **start(method, "helfrich"),
    )


RECIPES: dict[str, Recipe] = {
    "170": lambda method: paper(method, 170),
    "360": lambda method: paper(method, 360),
    "512": lambda method: paper(method, 512),
    "small": small,
}
