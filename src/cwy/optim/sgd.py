"""Gradient descent on the Stiefel manifold."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .base import Mixture, Rate, StiefelOptimizer, read_lr
from .batch import Batch


class StiefelSGD(StiefelOptimizer):
    r"""Take Riemannian gradient steps, which keep orthonormal matrices orthonormal.

    These are the paper's RGD-{C,E}-{C,QR}. With the Riemannian gradient Z at X, momentum $\mu$ and
    the retraction R,
    $$ B \leftarrow \mu\,P_X(B) + Z, \qquad X \leftarrow R_X(-\eta B), $$
    where $P_X$ projects to the tangent space. Matrices of one shape in a group are updated
    together. A step on a GPU does not synchronize with the host and can be captured in a CUDA
    graph. No step draws random numbers.

    Args:
        params: parameters, or groups of them. Each is a matrix ``(*, N, M)`` with orthonormal
            columns, or a wide matrix with orthonormal rows. In a group, ``"kernel": True`` flattens
            parameters from dimension 1, as :func:`cwy.orthogonal` does with convolutions. A group
            with ``"stiefel": False`` has free parameters, which get the step of
            ``torch.optim.SGD``.
        lr: the paper's $\eta$, a number or a tensor.
        momentum: $\mu$.
        metric: "canonical" or "euclidean".
        retraction: "cayley" or "qr".
        maximize: whether to ascend.
        error_if_nonfinite: whether a gradient that is not finite raises an error, which
            synchronizes with the host, or counts as zero. The default raises only on the CPU.
        project: whether to move parameters that are off the manifold, now or after a later write,
            to its nearest point. The default raises an error.

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
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "metric": metric,
            "retraction": retraction,
            "maximize": maximize,
            "error_if_nonfinite": error_if_nonfinite,
            "project": project,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        momentum = group["momentum"]
        if not 0 <= momentum < 1:
            raise ValueError(
                f"StiefelSGD: momentum must be at least 0 and below 1, got {momentum}."
            )
        super()._check_group(group)

    def _mixture(self, group: dict[str, Any]) -> Mixture:
        momentum = group["momentum"]
        if not momentum:
            return Mixture(key=None, buffer_weight=0.0, gradient_weight=1.0)
        return Mixture(key="momentum_buffer", buffer_weight=momentum, gradient_weight=1.0)

    def _rate(self, batch: Batch, g: Tensor) -> float | Tensor:
        return batch.group["lr"]

    def _read_rate(self, batch: Batch, g: Tensor) -> Rate | None:
        lr = read_lr(batch.group)
        if lr is None:
            return None
        return Rate(lr, state={})

    def _update_free(self, batch: Batch) -> None:
        g = batch.gradients()
        momentum = batch.group["momentum"]
        if momentum:
            g = g + momentum * batch.read("momentum_buffer")
            batch.write("momentum_buffer", g)
        batch.move(batch.points() - batch.group["lr"] * g)
