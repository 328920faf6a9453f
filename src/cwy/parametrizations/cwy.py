"""CWY: the paper's map onto the orthogonal group."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .. import ops
from ..ops.wy.wy import matrix_and_pull_back
from ..registry import register
from .reflections import Length, ReflectionMap


@register(
    "cwy",
    domain="O_L(N), complex with L = N: U(N)",
    kind="square",
    complex=True,
    paper="Likhosherstov et al. 2021",
)
class CWY(ReflectionMap):
    r"""Map $\mathbb{R}^{N\times L} \to O_L(N)$, all reflections at once.

    :func:`~cwy.ops.cwy_matrix` has the formula. It costs $O(L^2N + LN^2)$, in a handful of matrix
    products. A multiplication costs $O(LN)$ per vector.

    Args:
        n, m: N. ``m``, if given, is N too.
        reflections: L, from 1 to N (default).
        length: the norm of the vectors at the start, as in :func:`cwy.orthogonal`.
        batch, dtype, device: of the weight.

    Example:
        >>> q = CWY(6, reflections=4)
        >>> orthogonality_error(q(q.sample())) < 1e-5
        True
    """

    def __init__(
        self,
        n: int,
        m: int | None = None,
        *,
        reflections: int | None = None,
        length: Length = "matched",
        **like,
    ) -> None:
        super().__init__(n, m, reflections=reflections, length=length, **like)
        if self.m != self.n:
            raise ValueError(f"{self._call}: CWY is square. For {self.n} x {self.m} use TCWY.")

    def product(self, v: Tensor, diagonal: Tensor) -> Tensor:
        return ops.cwy_matrix(v, signs=diagonal)

    def product_and_pull_back(
        self, v: Tensor, signs: Tensor
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
        return matrix_and_pull_back(v, signs)

    def product_times(self, v: Tensor, x: Tensor, adjoint: bool) -> Tensor:
        return ops.cwy_multiply(v, x, adjoint)
