"""Settings of video prediction, by name. Those of the paper are never edited: a change is a new name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ..data import kth, weizmann
from ..engine.config import Config
from ..engine.task import Recipe

METHODS = (
    "tcwy", "own", "rgd-c-c", "rgd-e-c", "rgd-c-qr", "rgd-e-qr", "rgd-adam", "orth-init", "glorot", "zeros", "convlstm",
)  # fmt: skip
"""The designs of the recurrent unit that Table 4 compares."""


@dataclass(frozen=True)
class VideoConfig(Config):
    """Settings of video prediction.

    Attributes:
        action: which of the set's; "all" of Moving MNIST.
        epochs: times that the training sequences are seen.
        channels: of the first and last recurrent unit; the inner ones have twice and four times as many.
        kernel_size: q.
        bucket: batches are padded to a multiple of so many steps, so that few graphs serve all of them.
        test_batch_size: sequences at once in an evaluation.
        eager: runs everything as it is written, step by step, with no graph and no adjoint by hand: to be compared with.
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
    """Batch 3, q = 3, rate 1e-3, 150 epochs; of the best state on the validation persons the test persons are predicted.

    The rate of ``rgd-adam`` is the length of a step in the Frobenius norm: 0.1 is what Adam's steps of 1e-3 a number have.
    """
    return VideoConfig(action=action, orthogonal_lr=0.1 if method == "rgd-adam" else 1e-3)


def small(method: str, action: str) -> VideoConfig:
    """For a CPU: minutes."""
    return replace(
        paper(method, action),
        channels=8,
        epochs=2,
        batch_size=16,
        test_batch_size=100,
        save_every=50,
    )


def _named(recipes: dict[str, Recipe]) -> dict[str, Recipe]:
    """Each recipe, and again with its method's name before its own."""
    return recipes | {
        f"{method}-{name}": recipe for method in METHODS for name, recipe in recipes.items()
    }


KTH_RECIPES = _named({action: partial(paper, action=action) for action in kth.ACTIONS})
WEIZMANN_RECIPES = _named({action: partial(paper, action=action) for action in weizmann.ACTIONS})
MOVING_RECIPES = _named(
    {"digits": partial(paper, action="all"), "small": partial(small, action="all")}
)
