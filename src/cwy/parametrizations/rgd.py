"""No map at all: the weight itself is the parameter.

An optimizer of ``cwy.optim`` moves it along the manifold.
"""

from __future__ import annotations

from typing import Any

from ..registry import register
from .marks import OnManifold

_STIEFEL: dict[str, Any] = {
    "domain": "St(N, M), U(N)",
    "kind": "any",
    "complex": True,
    "on_manifold": True,
}


@register("rgd-c-c", paper="Tagare 2011", **_STIEFEL)
@register("rgd", paper="Wisdom et al. 2016", **_STIEFEL)
class RGD(OnManifold):
    """Descend on the manifold by the canonical metric and the Cayley retraction.

    The weight itself is the parameter, so there is nothing to compute in the forward pass. The
    weight starts Haar-random, and :func:`cwy.optim.for_model` makes the optimizer that moves it,
    :class:`~cwy.optim.StiefelSGD`. With any other optimizer it leaves the manifold, and the first
    such step warns. ``with torch.no_grad(): layer.weight.copy_(Q)`` assigns a matrix. State dicts
    have the weight under its own name. An average of entries, such as
    ``torch.optim.swa_utils.AveragedModel``, is off the manifold.
    ``cwy.optim.for_model(averaged.module, project=True)`` brings it back.

    Args:
        n, m: the matrix is N x M.
        momentum: of the optimizer.
        batch, dtype, device: of the weight.

    Example:
        >>> layer = orthogonal(torch.nn.Linear(6, 6), method="rgd-c-c")
        >>> sorted(layer.state_dict()), orthogonality_error(layer.weight) < 1e-5
        (['bias', 'weight'], True)
    """

    rule = "sgd"
    metric, retraction = "canonical", "cayley"

    def __init__(self, n: int, m: int | None = None, *, momentum: float = 0.0, **like) -> None:
        super().__init__(n, m, **like)
        self.settings = {"metric": self.metric, "retraction": self.retraction, "momentum": momentum}


@register("rgd-e-c", paper="Likhosherstov et al. 2021", **_STIEFEL)
class RGDEC(RGD):
    """Descend as :class:`RGD`, by the Euclidean metric and the Cayley retraction."""

    metric = "euclidean"


@register("rgd-c-qr", paper="Absil et al. 2008", **_STIEFEL)
class RGDCQR(RGD):
    """Descend as :class:`RGD`, by the canonical metric and the QR retraction."""

    retraction = "qr"


@register("rgd-e-qr", paper="Absil et al. 2008", **_STIEFEL)
class RGDEQR(RGD):
    """Descend as :class:`RGD`, by the Euclidean metric and the QR retraction."""

    metric, retraction = "euclidean", "qr"


@register("rgd-adam", paper="Li et al. 2020", **_STIEFEL)
class RGDAdam(OnManifold):
    """Descend by Adam on the manifold, :class:`~cwy.optim.StiefelAdam`, otherwise as :class:`RGD`.

    Args:
        n, m: the matrix is N x M.
        betas, eps: of the optimizer.
        batch, dtype, device: of the weight.
    """

    rule = "adam"

    def __init__(
        self,
        n: int,
        m: int | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **like,
    ) -> None:
        super().__init__(n, m, **like)
        self.settings = {"betas": tuple(betas), "eps": eps}
