"""Convergence of stochastic gradient descent on O(N) and St(N, M)."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from ...api import orthogonal
from ..engine.config import ConfigError
from ..engine.task import Batch, Settings, Task
from .recipes import RECIPES, ConvergenceConfig


class Descent(nn.Module):
    """Matrices ``weight (R, N, M)`` by their vectors, which start alike; and what has been seen of them so far."""

    gradient: Tensor
    minimum: Tensor
    norms: Tensor
    growth: Tensor

    def __init__(self, method: str, replicas: int, start: Tensor) -> None:
        super().__init__()
        size = start.shape[-2:]
        self.weight = nn.Parameter(
            torch.empty(replicas, *size, dtype=start.dtype, device=start.device)
        )
        orthogonal(self, method=method, init="random", length="raw")
        with torch.no_grad():
            self.vectors.copy_(start)
        for name in ("gradient", "minimum", "growth"):
            self.register_buffer(name, start.new_full((), math.inf))
        self.register_buffer("norms", self.vectors.detach().norm(dim=-2))

    @property
    def vectors(self) -> Tensor:
        """The reflection vectors as columns, ``(R, N, M)``."""
        return cast(nn.ModuleDict, self.parametrizations)["weight"].original  # pyrefly: ignore

    def forward(self) -> Tensor:
        return self.weight


class Convergence(Task[ConvergenceConfig]):
    r"""Descend a random objective over O(N) or St(N, M), by steps of k^-0.5 along minibatch gradients.

    It is $f(X) = \frac1n \sum_i \log\cosh(w_i^\top X a_i - y_i)$.

    The terms are drawn by the seed. As the theorem asks, f has Lipschitz gradients, a minibatch's gradient has the right
    mean and bounded variance, and the first vectors are fixed and not zero. Logged are, over all replicas, the mean of
    $\sum_l \lVert\nabla_{v_l} f\rVert^2$ before the last step (``gradient``), its minimum over all steps (``minimum``), the
    shortest vector (``norm``), and the smallest relative growth of a vector in any step (``growth``).
    """

    name = "convergence"
    Config = ConvergenceConfig
    recipes = RECIPES
    best = None
    precision = "float64"
    config: ConvergenceConfig

    def __init__(self, settings: Settings, device: torch.device) -> None:
        super().__init__(settings, device)
        N, M = self.config.N, self.config.M
        if (N == M) != (settings.method == "cwy") or N < M:
            raise ConfigError(
                f"N x M = {N} x {M} does not suit {settings.method}: cwy needs N = M, tcwy N > M."
            )
        draw = {"generator": self.generator("objective"), "dtype": self.dtype, "device": device}
        self.w = torch.randn(self.config.terms, N, **draw)
        self.a = torch.randn(self.config.terms, M, **draw) / math.sqrt(M)
        self.y = torch.randn(self.config.terms, **draw)

    @classmethod
    def methods(cls) -> list[str]:
        return ["cwy", "tcwy"]

    @property
    def iterations(self) -> int:
        return self.config.iterations

    def model(self) -> Descent:
        size = self.config.N, self.config.M
        start = torch.randn(
            size, generator=self.generator("start"), dtype=self.dtype, device=self.device
        )
        return Descent(self.settings.method, self.config.replicas, start / start.norm(dim=0))

    def objective(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        """f of every replica ``(R,)``, or of the terms chosen for each ``(R, b)``."""
        if chosen is None:
            z = torch.einsum("nN,rNM,nM->rn", self.w, x, self.a) - self.y
        else:
            z = torch.einsum("rbN,rNM,rbM->rb", self.w[chosen], x, self.a[chosen]) - self.y[chosen]
        return (nn.functional.softplus(2 * z) - z - math.log(2)).mean(1)

    def batch(self, step: int) -> Batch:
        size = self.config.replicas, self.config.batch_size
        return (
            torch.randint(
                self.config.terms, size, generator=self.generator("terms", step), device=self.device
            ),
        )

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        if len(batch[0]) != self.config.replicas:
            raise ConfigError("convergence runs in one process: its replicas are not shared out.")
        return self.objective(model(), batch[0]).mean(), {}

    def rate(self, step: int) -> float:
        # The loss is a mean over replicas, whose gradients are a part each: together they take the theorem's step.
        return self.config.replicas / math.sqrt(step + 1)

    def watch(self, model: nn.Module) -> dict[str, Tensor]:
        model = cast(Descent, model)
        (gradient,) = torch.autograd.grad(self.objective(model.weight).sum(), model.vectors)
        model.gradient.copy_(gradient.square().sum((-2, -1)).mean())
        torch.minimum(model.minimum, model.gradient, out=model.minimum)
        return {}

    @torch.no_grad()
    def after_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        model = cast(Descent, model)
        norms = model.vectors.norm(dim=-2)
        torch.minimum(model.growth, (norms / model.norms - 1).min(), out=model.growth)
        model.norms.copy_(norms)

    def evaluate(self, model: nn.Module) -> dict[str, dict[str, float]]:
        model = cast(Descent, model)
        seen = {
            "loss": self.objective(model.weight).mean(),
            "gradient": model.gradient,
            "minimum": model.minimum,
        }
        seen |= {"norm": model.norms.min(), "growth": model.growth}
        return {"test": dict(zip(seen, torch.stack(list(seen.values())).tolist(), strict=True))}
