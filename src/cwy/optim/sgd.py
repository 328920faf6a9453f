"""Gradient descent on the Stiefel manifold."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..manifolds import stiefel
from .base import StiefelOptimizer
from .batch import Batch


class StiefelSGD(StiefelOptimizer):
    r"""Riemannian gradient descent: orthonormal matrices stay orthonormal (the paper's RGD-{C,E}-{C,QR}).

    With the Riemannian gradient Z at X, momentum $\mu$ and the retraction R,
    $$ B \leftarrow \mu\,P_X(B) + Z, \qquad X \leftarrow R_X(-\eta B), $$
    where $P_X$ projects to the tangent space. Matrices of one shape in a group are updated together. A step neither waits
    for the device nor draws random numbers, and can be captured in a CUDA graph.

    Args:
        params: parameters, or groups of them. On the manifold are matrices ``(*, N, M)`` with orthonormal columns; wide ones
            with orthonormal rows. In a group ``"kernel": True`` flattens parameters from dimension 1, as
            :func:`cwy.orthogonal` does with convolutions; ``"stiefel": False`` makes a group of free ones, for which this
            is ``torch.optim.SGD``.
        lr: the paper's $\eta$; a number or a tensor.
        momentum: $\mu$.
        metric: "canonical" or "euclidean".
        retraction: "cayley" or "qr".
        maximize: whether to ascend.
        error_if_nonfinite: whether a gradient that is not finite raises (which waits for the device) or counts as zero.
            By default it raises on the CPU alone.
        project: moves parameters that are not on the manifold, now or because they were written to later, to the nearest point
            of it; by default they are refused.

    Example:
        >>> x = torch.nn.Parameter(torch.eye(5, 2))
        >>> optimizer = StiefelSGD([x], lr=0.1)
        >>> for _ in range(200):
        ...     optimizer.zero_grad()
        ...     loss = (x.mT @ torch.arange(5.0).diag() @ x).trace()
        ...     loss.backward()
        ...     optimizer.step()
        >>> orthogonality_error(x) < 1e-5
        True

    References:
        Wen and Yin, A feasible method for optimization with orthogonality constraints, 2013.
    """

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        *,
        metric: str = "canonical",
        retraction: str = "cayley",
        maximize: bool = False,
        error_if_nonfinite: bool | None = None,
        project: bool = False,
    ) -> None:
        step = {
            "lr": lr,
            "momentum": momentum,
            "metric": metric,
            "retraction": retraction,
            "maximize": maximize,
        }
        super().__init__(
            params, {**step, "error_if_nonfinite": error_if_nonfinite, "project": project}
        )

    def _check(self, group: dict[str, Any]) -> None:
        if not 0 <= group["momentum"] < 1:
            raise ValueError(
                f"StiefelSGD: momentum must be at least 0 and below 1, got {group['momentum']}."
            )
        super()._check(group)

    def _update(self, group: dict[str, Any], batch: Batch) -> None:
        x, g, momentum = batch.points(), batch.gradients(), group["momentum"]
        if not group["stiefel"]:
            if momentum:
                g = g + momentum * batch.read("momentum_buffer")
                batch.write("momentum_buffer", g)
            batch.move(x - group["lr"] * g)
            return
        z = stiefel.gradient(x, g, group["metric"])
        if momentum:
            z = z + stiefel.project(x, batch.read("momentum_buffer")) * momentum
            batch.write("momentum_buffer", z.at(x))
        batch.move(stiefel.RETRACTIONS[group["retraction"]](x, z, -group["lr"]))
