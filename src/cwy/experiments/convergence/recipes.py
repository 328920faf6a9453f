"""Named settings of the convergence task."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.config import Config
from ..engine.task import Recipe


@dataclass(frozen=True)
class ConvergenceConfig(Config):
    """Hold the settings of the convergence task.

    The learning rates are 1, so that step k has the theorem's $k^{-0.5}$.

    Attributes:
        N, M: the matrices are N x M, with M = N for cwy.
        terms: of the objective's sum.
        batch_size: terms per step.
        replicas: descents from one start with independent noise, to estimate expectations.
        iterations: K.
    """

    N: int = 16
    M: int = 16
    terms: int = 128
    batch_size: int = 4
    replicas: int = 16
    iterations: int = 10_000
    optimizer: str = "sgd"
    lr: float = 1.0
    orthogonal_lr: float = 1.0
    log_every: int = 200
    evaluate_every: int | None = 100
    save_every: int = 2_000


def standard(method: str, iterations: int) -> ConvergenceConfig:
    """Return O(16) for cwy, St(24, 8) for tcwy."""
    every = iterations // 100
    if method == "tcwy":
        return ConvergenceConfig(N=24, M=8, iterations=iterations, evaluate_every=every)
    return ConvergenceConfig(N=16, M=16, iterations=iterations, evaluate_every=every)


RECIPES: dict[str, Recipe] = {
    "standard": lambda method: standard(method, 10_000),
    "small": lambda method: standard(method, 2_000),
}
