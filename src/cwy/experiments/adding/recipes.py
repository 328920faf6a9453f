"""Named settings of the adding problem."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.config import ConfigError
from ..engine.task import Recipe
from ..recurrent import RecurrentConfig, start


@dataclass(frozen=True)
class AddingConfig(RecurrentConfig):
    """Hold the settings of the adding problem.

    Attributes:
        T: length of the sequences.
        iterations: training steps, each on fresh data.
        evaluation_batches: held-out batches per evaluation.
    """

    T: int = 200
    iterations: int = 4000
    evaluation_batches: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.T < 2:
            raise ConfigError(f"T must be at least 2, for two numbers to add, got {self.T}.")


def standard(method: str, T: int) -> AddingConfig:
    """Return N = 170, batch 128, Adam, ReLU and Helfrich's initial angles."""
    return AddingConfig(
        T=T,
        hidden_size=170,
        iterations=10_000,
        optimizer="adam",
        lr=2e-3,
        orthogonal_lr=2e-4,
        evaluate_every=500,
        **start(method, "helfrich", "relu"),
    )


def small(method: str) -> AddingConfig:
    """Return settings that a CPU learns within half a minute."""
    return AddingConfig(
        T=40,
        hidden_size=48,
        batch_size=64,
        iterations=2000,
        optimizer="adam",
        lr=5e-3,
        orthogonal_lr=5e-4,
        evaluate_every=500,
        **start(method, "helfrich", "relu"),
    )


RECIPES: dict[str, Recipe] = {
    "200": lambda method: standard(method, 200),
    "750": lambda method: standard(method, 750),
    "small": small,
}
