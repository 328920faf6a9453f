"""Settings of Copying, by name. Those of the paper are never edited: a change is a new name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..engine.task import Recipe
from ..recurrent import RecurrentConfig, start


@dataclass(frozen=True)
class CopyingConfig(RecurrentConfig):
    """Settings of Copying.

    Attributes:
        T: blanks between the symbols and the cue.
        iterations: steps of training, each on fresh data.
        evaluation_batches: held-out batches that an evaluation takes.
    """

    T: int = 1000
    iterations: int = 4000
    evaluation_batches: int = 4


def paper(method: str, T: int) -> CopyingConfig:
    """N = 190, batch 128, 4000 iterations; Henaff's initial angles, Helfrich's for scornn."""
    begin = start(method, "helfrich" if method == "scornn" else "henaff")
    return CopyingConfig(T=T, lr=2e-4, orthogonal_lr=2e-5, evaluate_every=500, **begin)


def small(method: str) -> CopyingConfig:
    """Learnt on a CPU within half a minute."""
    begin = start(method, "helfrich" if method == "scornn" else "henaff")
    return CopyingConfig(
        T=100, hidden_size=96, batch_size=64, iterations=800, lr=1e-3, orthogonal_lr=1e-4, evaluate_every=200, save_every=200,
        **begin,
    )  # fmt: skip


def demo(method: str) -> CopyingConfig:
    """A quarter of a minute on a CPU, with as many units as the paper: what `cwy demo` shows."""
    return replace(small(method), T=50, hidden_size=190, iterations=200, evaluate_every=None)


RECIPES: dict[str, Recipe] = {
    "1000": lambda method: paper(method, 1000),
    "2000": lambda method: paper(method, 2000),
    "small": small,
    "demo": demo,
}
