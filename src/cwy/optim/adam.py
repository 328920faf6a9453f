"""Adam on the Stiefel manifold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..manifolds import stiefel
from .base import Mixture, Rate, StiefelOptimizer, read_lr
from .batch import Batch, largest_product

# Squares of smaller or larger numbers, and their sum, leave the range of float64.
_LEAST_NORM = 1e-140
_LARGEST_NORM = 1e140


class StiefelAdam(StiefelOptimizer):
    r"""Take Adam's steps on the Stiefel manifold (the paper's RGD-Adam), each an exact retraction.

    With the Riemannian gradient Z at X and the gradient G in the ambient space,
    $$ B \leftarrow \beta_1 P_X(B) + (1 - \beta_1) Z, \quad
       v \leftarrow \beta_2 v + (1 - \beta_2)\lVert G\rVert_F^2, \quad
       X \leftarrow R_X(-\eta\,\hat B/(\sqrt{\hat v} + \epsilon)), $$
    where hats are Adam's corrections for the zeros at the start. The second moment is one number
    per matrix, since a division by entries would leave the tangent space. The Frobenius length of
    a step is therefore about $\eta$. The state has the root of v, which neither overflows nor
    underflows.

    Args:
        params, lr, metric, retraction, maximize, error_if_nonfinite, project: as for
            :class:`StiefelSGD`. A group with ``"stiefel": False`` gets the step of
            ``torch.optim.Adam``.
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
        Li, Li and Todorovic, Efficient Riemannian optimization on the Stiefel manifold via the
        Cayley transform, 2020.
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
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "metric": metric,
            "retraction": retraction,
            "maximize": maximize,
            "error_if_nonfinite": error_if_nonfinite,
            "project": project,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        betas = group["betas"]
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"StiefelAdam: betas must be at least 0 and below 1, got {betas}.")
        if not group["eps"] >= 0:
            raise ValueError(f"StiefelAdam: eps must be at least 0, got {group['eps']}.")
        super()._check_group(group)

    def _mixture(self, group: dict[str, Any]) -> Mixture:
        first, _ = group["betas"]
        return Mixture(key="exp_avg", buffer_weight=first, gradient_weight=1 - first)

    def _rate(self, batch: Batch, g: Tensor) -> Tensor:
        group = batch.group
        first, second = group["betas"]
        steps = batch.count()
        norm = _norm(g)
        before = batch.read_numbers("exp_avg_norm", norm)
        root = torch.hypot(math.sqrt(second) * before, math.sqrt(1 - second) * norm)
        batch.write_numbers("exp_avg_norm", root)
        corrected = root / _total_weight(second, steps).sqrt()
        return group["lr"] / _total_weight(first, steps) / (corrected + group["eps"])

    def _read_rate(self, batch: Batch, g: Tensor) -> Rate | None:
        group = batch.group
        lr = read_lr(group)
        if lr is None or not batch.has_state(("step", "exp_avg_norm")):
            return None
        first, second = group["betas"]
        # float32 neither overflows nor underflows in float64.
        wide = torch.promote_types(g.dtype, torch.float64)
        norm = torch.linalg.vector_norm(g, dtype=wide).item()
        if not _LEAST_NORM < norm < min(_LARGEST_NORM, largest_product(batch.dtype)):
            return None
        steps = batch.read_number("step") + 1
        before = batch.read_number("exp_avg_norm")
        root = math.hypot(math.sqrt(second) * before, math.sqrt(1 - second) * norm)
        corrected = root / math.sqrt(-math.expm1(steps * _log(second)))
        value = lr / -math.expm1(steps * _log(first)) / (corrected + group["eps"])
        return Rate(value, state={"step": steps, "exp_avg_norm": root})

    def _update_free(self, batch: Batch) -> None:
        group = batch.group
        first, second = group["betas"]
        g = batch.gradients()
        steps = batch.count()
        first_total = _total_weight(first, steps)
        second_root = _total_weight(second, steps).sqrt()
        mean = torch.lerp(batch.read("exp_avg"), g, 1 - first)
        square = torch.lerp(batch.read("exp_avg_sq"), _by_parts(torch.square, g), 1 - second)
        batch.write("exp_avg", mean)
        batch.write("exp_avg_sq", square)

        def change(mean: Tensor, square: Tensor) -> Tensor:
            return mean / first_total / (square.sqrt() / second_root + group["eps"])

        batch.move(batch.points() - group["lr"] * _by_parts(change, mean, square))


def _by_parts(f: Callable[..., Tensor], *xs: Tensor) -> Tensor:
    """Apply a function of real numbers, to real and imaginary parts of complex ones in turn."""
    if not xs[0].is_complex():
        return f(*xs)
    return torch.complex(f(*(x.real for x in xs)), f(*(x.imag for x in xs)))


def _log(beta: float) -> float:
    if beta == 0:
        return -math.inf
    return math.log(beta)


def _total_weight(beta: float, steps: Tensor) -> Tensor:
    r"""Compute $1 - \beta^t$, the sum of the weights of a running mean that began at zero."""
    if beta == 0:
        return torch.ones_like(steps)
    return -torch.expm1(steps * math.log(beta))


def _norm(g: Tensor) -> Tensor:
    """Compute the Frobenius norm of each matrix, ``(*, 1, 1)``, without overflow."""
    largest = torch.linalg.vector_norm(g, torch.inf, dim=(-2, -1), keepdim=True)
    scale = largest.clamp_min(torch.finfo(largest.dtype).tiny)
    scaled = stiefel.divide(g, scale)
    return scale * torch.linalg.vector_norm(scaled, dim=(-2, -1), keepdim=True)
