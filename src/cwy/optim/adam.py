"""Adam on the Stiefel manifold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..manifolds import stiefel
from .base import StiefelOptimizer
from .batch import Batch


class StiefelAdam(StiefelOptimizer):
    r"""Adam on the Stiefel manifold (the paper's RGD-Adam), each step an exact retraction.

    With the Riemannian gradient Z at X and G that in the ambient space,
    $$ B \leftarrow \beta_1 P_X(B) + (1 - \beta_1) Z, \quad v \leftarrow \beta_2 v + (1 - \beta_2)\lVert G\rVert_F^2, \quad
       X \leftarrow R_X(-\eta\,\hat B/(\sqrt{\hat v} + \epsilon)), $$
    hats being Adam's corrections for the zeros at the start. The second moment is one number a matrix, since dividing entry by
    entry would leave the tangent space: $\eta$ is about the Frobenius length of a step. It is kept as its root, which
    neither overflows nor underflows.

    Args:
        params, lr, metric, retraction, maximize, error_if_nonfinite, project: as for :class:`StiefelSGD`. A group with
            ``"stiefel": False`` gets ``torch.optim.Adam``'s step.
        betas: $\beta_1, \beta_2$.
        eps: $\epsilon$.

    Example:
        >>> x = torch.nn.Parameter(torch.eye(5, 2))
        >>> optimizer = StiefelAdam([x], lr=0.1)
        >>> (x.mT @ torch.arange(10.0).reshape(5, 2)).trace().backward()
        >>> optimizer.step()
        >>> orthogonality_error(x) < 1e-5
        True

    References:
        Li, Li and Todorovic, Efficient Riemannian optimization on the Stiefel manifold via the Cayley transform, 2020.
    """

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        metric: str = "euclidean",
        retraction: str = "cayley",
        maximize: bool = False,
        error_if_nonfinite: bool | None = None,
        project: bool = False,
    ) -> None:
        step = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "metric": metric,
            "retraction": retraction,
            "maximize": maximize,
        }
        super().__init__(
            params, {**step, "error_if_nonfinite": error_if_nonfinite, "project": project}
        )

    def _check(self, group: dict[str, Any]) -> None:
        if not all(0 <= beta < 1 for beta in group["betas"]):
            raise ValueError(
                f"StiefelAdam: betas must be at least 0 and below 1, got {group['betas']}."
            )
        if not group["eps"] >= 0:
            raise ValueError(f"StiefelAdam: eps must be at least 0, got {group['eps']}.")
        super()._check(group)

    def _update(self, group: dict[str, Any], batch: Batch) -> None:
        x, g, (first, second), steps = (
            batch.points(),
            batch.gradients(),
            group["betas"],
            batch.count(),
        )
        of_first, of_second = _so_far(first, steps), _so_far(second, steps).sqrt()
        if group["stiefel"]:
            z = stiefel.project(x, batch.read("exp_avg")) * first + stiefel.gradient(
                x, g, group["metric"]
            ) * (1 - first)
            batch.write("exp_avg", z.at(x))
            size = _norm(g)
            root = torch.hypot(
                math.sqrt(second) * batch.read_numbers("exp_avg_norm", size),
                math.sqrt(1 - second) * size,
            )
            batch.write_numbers("exp_avg_norm", root)
            rate = group["lr"] / of_first / (root / of_second + group["eps"])
            batch.move(stiefel.RETRACTIONS[group["retraction"]](x, z, -rate))
            return
        mean = torch.lerp(batch.read("exp_avg"), g, 1 - first)
        square = torch.lerp(batch.read("exp_avg_sq"), _by_parts(torch.square, g), 1 - second)
        batch.write("exp_avg", mean)
        batch.write("exp_avg_sq", square)
        change = _by_parts(
            lambda m, s: m / of_first / (s.sqrt() / of_second + group["eps"]), mean, square
        )
        batch.move(x - group["lr"] * change)


def _by_parts(f: Callable[..., Tensor], *xs: Tensor) -> Tensor:
    """f of real numbers; real and imaginary parts of complex ones are numbers of their own, as in torch."""
    return (
        torch.complex(f(*(x.real for x in xs)), f(*(x.imag for x in xs)))
        if xs[0].is_complex()
        else f(*xs)
    )


def _so_far(beta: float, steps: Tensor) -> Tensor:
    """1 - beta^steps: what the weights of a running mean that began at zero add up to."""
    return -torch.expm1(steps * math.log(beta)) if beta else torch.ones_like(steps)


def _norm(g: Tensor) -> Tensor:
    """The Frobenius norm of each matrix, ``(*, 1, 1)``, without overflow."""
    largest = torch.linalg.vector_norm(g, torch.inf, dim=(-2, -1), keepdim=True)
    scale = largest.clamp_min(torch.finfo(largest.dtype).tiny)
    return scale * torch.linalg.vector_norm(stiefel.over(g, scale), dim=(-2, -1), keepdim=True)
