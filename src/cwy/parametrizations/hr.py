"""HR: the same reflections, one at a time."""

from __future__ import annotations

from torch import Tensor

from .. import ops
from ..registry import register
from .reflections import ReflectionMap


@register("hr", domain="O_L(N), St(N, M)", kind="any", complex=True, paper="Mhammedi et al. 2017")
class HR(ReflectionMap):
    r"""Map as :class:`CWY` and :class:`TCWY` do, one Householder reflection after another.

    Costs $O(LNM)$ in L dependent steps: what CWY replaces, kept for comparison.

    Args:
        n, m: the matrix is N x M, $N \ge M$.
        reflections: L. All M by default. Only a square matrix may have fewer.
        length: the norm of the vectors at the start, as in :func:`cwy.orthogonal`.
        batch, dtype, device: of the weight.

    Example:
        >>> q = HR(6, reflections=4)
        >>> orthogonality_error(q(q.sample())) < 1e-5
        True
    """

    def product(self, v: Tensor, diagonal: Tensor) -> Tensor:
        if self.m == self.n:
            return ops.cwy_matrix(v, signs=diagonal, backend="reference")
        return ops.tcwy_matrix(v, signs=diagonal, backend="reference")

    def product_times(self, v: Tensor, x: Tensor, adjoint: bool) -> Tensor:
        return ops.cwy_multiply(v, x, adjoint, backend="reference")
