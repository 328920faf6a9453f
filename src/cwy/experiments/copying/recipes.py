"""Named settings of Copying. Those of the paper are never edited: a change gets a new name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..engine.task import Recipe
from ..recurrent import RecurrentConfig, start


@dataclass(frozen=True)
class CopyingConfig(RecurrentConfig):
    """Hold the settings of Copying.

    Attributes:
        T: blanks between the symbols and the cue.
        iterations: training steps, each on fresh data.
        evaluation_batches: held-out batches per evaluation.
    """

    T: int = 1000
    iterations: int = 4000
    evaluation_batches: int = 4


def _start(method: str) -> dict[str, Any]:
    """Return Henaff's initial angles, or Helfrich's for scornn."""
    if method == "scornn":
        return start(method, "helfrich")
    return start(method, "henaff")


def paper(method: str, T: int) -> CopyingConfig:
    """Return the paper's settings: N = 190, batch 128, 4000 iterations."""
    return CopyingConfig(T=T, lr=2e-4, orthogonal_lr=2e-5, evaluate_every=500, **_start(method))


def small(method: str) -> CopyingConfig:
    """Return settings that a CPU learns within half a minute."""
    return CopyingConfig(
        T=100,
        hidden_size=96,
        batch_size=64,
        iterations=800,
        lr=1e-3,
        orthogonal_lr=1e-4,
        evaluate_every=200,
        save_every=200,
        **_start(method),
    )


def demo(method: str) -> CopyingConfig:
    """Return the settings of `cwy demo`: the paper's N, a quarter of a minute on a CPU."""
    return replace(small(method), T=50, hidden_size=190, iterations=200, evaluate_every=None)


RECIPES: dict[str, Recipe] = {
    "1000": lambda method: paper(method, 1000),
    "2000": lambda method: paper(method, 2000),
    "small": small,
    "demo": demo,
}
