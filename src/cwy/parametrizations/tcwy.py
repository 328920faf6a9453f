"""T-CWY: the paper's map onto the Stiefel manifold."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .. import ops
from ..ops.wy.wy import matrix_and_pull_back
from ..registry import register
from .reflections import ReflectionMap


@register("tcwy", domain="St(N, M)", kind="any", complex=True, paper="Likhosherstov et al. 2021")
class TCWY(ReflectionMap):
    r"""Map $\mathbb{R}^{N\times M} \to \mathrm{St}(N, M)$, the first M columns of M reflections.

    :func:`~cwy.ops.tcwy_matrix` computes it. Costs $4NM^2 + 7M^3/3$ operations, the fewest of the
    methods of Table 2, and never forms an N x N matrix.

    Args:
        n, m: the matrix is N x M, $N \ge M$.
        length: the norm of the vectors at the start, as in :func:`cwy.orthogonal`.
        batch, dtype, device: of the weight.

    Example:
        >>> omega = TCWY(1000, 3)
        >>> orthogonality_error(omega(omega.sample())) < 1e-5
        True
    """

    may_have_fewer = False

    def product(self, v: Tensor, diagonal: Tensor) -> Tensor:
        return ops.tcwy_matrix(v, signs=diagonal)

    def product_and_pull_back(
        self, v: Tensor, signs: Tensor
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
        return matrix_and_pull_back(v, signs, truncated=True)

    def product_times(self, v: Tensor, x: Tensor, adjoint: bool) -> Tensor:
        return ops.cwy_multiply(v, x, adjoint)
