"""Stochastic gradient descent on O(N) and St(N, M)."""

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
    """Hold R matrices by their reflection vectors, and statistics of the descent so far.

    Every matrix of ``weight (R, N, M)`` starts at the same vectors.

    Attributes:
        gradient: mean squared norm of the gradient before the last step.
        minimum: the smallest ``gradient`` of all steps.
        norms: ``(R, M)``, lengths of the vectors.
        growth: smallest relative growth of a vector in a step.
    """

    gradient: Tensor
    minimum: Tensor
    norms: Tensor
    growth: Tensor

    def __init__(self, method: str, replicas: int, start: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(start.new_empty(replicas, *start.shape[-2:]))
        orthogonal(self, method=method, init="random", length="raw")
        with torch.no_grad():
            self.vectors.copy_(start)
        for name in ("gradient", "minimum", "growth"):
            self.register_buffer(name, start.new_full((), math.inf))
        self.register_buffer("norms", self.vectors.detach().norm(dim=-2))

    @property
    def vectors(self) -> Tensor:
        """Return the reflection vectors as columns, ``(R, N, M)``."""
        return cast(nn.ModuleDict, self.parametrizations)["weight"].original  # pyrefly: ignore

    def forward(self) -> Tensor:
        return self.weight


class Convergence(Task[ConvergenceConfig]):
    r"""Descend a random objective over O(N) or St(N, M) in steps of k^-0.5 by minibatch gradients.

    The objective is $f(X) = \frac1n \sum_i \log\cosh(w_i^\top X a_i - y_i)$, with terms drawn by
    the seed. It satisfies the theorem's assumptions: f has Lipschitz gradients, a minibatch's
    gradient is unbiased with bounded variance, and the first vectors are fixed and not zero.

    The log has, over all replicas:

    - ``gradient``: the mean of $\sum_l \lVert\nabla_{v_l} f\rVert^2$ before the last step,
    - ``minimum``: its minimum over all steps,
    - ``norm``: the length of the shortest vector,
    - ``growth``: the smallest relative growth of a vector in any step.
    """

    name = "convergence"
    Config = ConvergenceConfig
    recipes = RECIPES
    best = None
    precision = "float64"
    config: ConvergenceConfig

    def __init__(self, settings: Settings, device: torch.device) -> None:
        super().__init__(settings, device)
        if self.config.warmup is not None:
            raise ConfigError(
                "warmup is no setting of convergence, whose steps are those of Theorem 4. "
                "Leave it out."
            )
        N, M = self.config.N, self.config.M
        suits = N > M
        if settings.method == "cwy":
            suits = N == M
        if not suits:
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
        start = torch.randn(
            self.config.N,
            self.config.M,
            generator=self.generator("start"),
            dtype=self.dtype,
            device=self.device,
        )
        return Descent(self.settings.method, self.config.replicas, start / start.norm(dim=0))

    def objective(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Return f of every replica ``(R,)``, or its mean over the chosen terms ``(R, b)``."""
        if chosen is None:
            z = torch.einsum("nN,rNM,nM->rn", self.w, x, self.a) - self.y
        else:
            z = torch.einsum("rbN,rNM,rbM->rb", self.w[chosen], x, self.a[chosen]) - self.y[chosen]
        return (nn.functional.softplus(2 * z) - z - math.log(2)).mean(1)

    def batch(self, step: int) -> Batch:
        chosen = torch.randint(
            self.config.terms,
            (self.config.replicas, self.config.batch_size),
            generator=self.generator("terms", step),
            device=self.device,
        )
        return (chosen,)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        if len(batch[0]) != self.config.replicas:
            raise ConfigError("convergence runs in one process: its replicas are not shared out.")
        return self.objective(model(), batch[0]).mean(), {}

    def rate(self, step: int) -> float:
        # The loss is a mean over replicas. The factor undoes it, so that each takes a whole step.
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
        metrics = {
            "loss": self.objective(model.weight).mean(),
            "gradient": model.gradient,
            "minimum": model.minimum,
            "norm": model.norms.min(),
            "growth": model.growth,
        }
        values = torch.stack(list(metrics.values())).tolist()
        return {"test": dict(zip(metrics, values, strict=True))}
