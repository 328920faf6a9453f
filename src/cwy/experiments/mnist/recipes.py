"""Settings of pixel-by-pixel MNIST, by name. Those of the paper are never edited: a change is a new name."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.task import Recipe
from ..recurrent import RecurrentConfig, start


@dataclass(frozen=True)
class PixelsConfig(RecurrentConfig):
    """Settings of pixel-by-pixel MNIST.

    Attributes:
        epochs: times that the training images are seen.
        pool: side of the squares of pixels that are averaged; 1 leaves the images as they are.
        test_batch_size: images at once in an evaluation.
    """

    epochs: int = 70
    pool: int = 1
    test_batch_size: int = 2000


def paper(method: str, hidden_size: int) -> PixelsConfig:
    """Batch 128, 70 epochs; exp of Helfrich's skew matrix to start from, its Cayley transform for scornn."""
    begin = start(method, "helfrich" if method == "scornn" else "helfrich-exp")
    return PixelsConfig(
        hidden_size=hidden_size,
        lr=7e-4,
        orthogonal_lr=7e-5,
        log_every=67,
        save_every=469 * 5,
        **begin,
    )


def small(method: str) -> PixelsConfig:
    """Images of 7 x 7, for a CPU: a minute."""
    return PixelsConfig(
        hidden_size=64, epochs=3, pool=4, lr=2e-3, orthogonal_lr=2e-4, log_every=67, save_every=469, **start(method, "helfrich")
    )  # fmt: skip


RECIPES: dict[str, Recipe] = {
    "170": lambda method: paper(method, 170),
    "360": lambda method: paper(method, 360),
    "512": lambda method: paper(method, 512),
    "small": small,
}
