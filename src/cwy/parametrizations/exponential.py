"""EXPRNN and DTRIV: the matrix exponential, from the identity and from a base that moves."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..ops._linalg import double, nearest_orthogonal
from ..ops.skew import logarithm, matrix_exp, multiply, polished, rotation
from ..registry import register
from .skew import SkewMap


@register("exprnn", domain="SO(N)", kind="square", paper="Lezcano-Casado and Martínez-Rubio 2019")
class EXPRNN(SkewMap):
    r"""$Q = \exp(A)$, $A = \mathrm{striu}(X) - \mathrm{striu}(X)^\top$: onto SO(N).

    Costs $O(N^3)$ (Table 1), in scaling and squaring. The backward pass takes three products for each of the forward pass.
    Squaring in float32 would lose digits, so it runs in float64 where the device has it at a fair speed. An X whose A has a
    norm above 6.7e7 raises: rounding would spoil its exponential.

    Starts as block-diagonal rotations with angles uniform in $[-\pi, \pi]$ (Henaff et al. 2016). Any Q of determinant 1
    can be assigned: X is then the upper triangle of its logarithm, with no angle above $\pi$.

    Args:
        n, m: N; ``m``, if given, is N too.
        batch, dtype, device: of the weight, real.

    Example:
        >>> q = EXPRNN(6)
        >>> orthogonality_error(q(q.sample())) < 1e-5
        True
    """

    def matrix(self, x: Tensor) -> Tensor:
        return rotation(self.skew(x)).to(x.dtype)

    def free(self, matrix: Tensor) -> Tensor:
        q = nearest_orthogonal(double(matrix))
        if (torch.linalg.slogdet(q).sign < 0).any():
            raise ValueError(
                f"{self._call}: the determinant is -1, and exp of a skew matrix has determinant 1. "
                "Flip the sign of one column, or use method='cwy' or 'dtriv'."
            )
        return logarithm(q).triu(1).to(dtype=matrix.dtype, device=matrix.device)

    def sample(self) -> Tensor:
        return self.in_planes(self.planes(-math.pi, math.pi))


@register(
    "dtriv", domain="SO(N): the component of its base", kind="square", paper="Lezcano-Casado 2019"
)
class DTRIV(SkewMap):
    r"""$Q = B\exp(A)$, $A = \mathrm{striu}(X) - \mathrm{striu}(X)^\top$, with a base B that follows: dynamic trivialization.

    Every K steps :func:`move_bases` moves B to $B\exp(A)$ and X to 0, so that the exponential is only used near 0,
    where it distorts the gradient least. K = ∞ is never to call it. Costs what EXPRNN costs, and a product.

    B is a buffer, kept in the state dict. It starts as block-diagonal rotations with angles uniform in
    $[-\pi, \pi]$ and X as 0. Any orthogonal Q can be assigned: it becomes B. The determinant is that of B for ever.

    Args:
        n, m: N; ``m``, if given, is N too.
        batch, dtype, device: of the weight, real.

    Example:
        >>> q = DTRIV(6)
        >>> x = torch.randn(6, 6)
        >>> before = q(x)
        >>> q.move_base(x)
        >>> torch.allclose(q(x), before, atol=1e-5), x.any().item()
        (True, False)
    """

    base: Tensor

    def __init__(self, n: int, m: int | None = None, **like) -> None:
        super().__init__(n, m, **like)
        # At least float32: a base rounded to half precision would not be orthogonal.
        dtype = torch.promote_types(self.dtype, torch.float32)
        self.register_buffer(
            "base", torch.eye(n, dtype=dtype, device=self.device).repeat(*self.batch, 1, 1)
        )

    def _apply(self, fn, recurse: bool = True):
        before = self.base
        super()._apply(fn, recurse)
        if self.base.dtype in (torch.float16, torch.bfloat16):
            self.base = before.to(device=self.base.device)
        return self

    def matrix(self, x: Tensor) -> Tensor:
        turn = matrix_exp(self.skew(x))
        return polished(multiply(self.base.to(turn.dtype), turn)).to(x.dtype)

    def free(self, matrix: Tensor) -> Tensor:
        self.base.copy_(nearest_orthogonal(double(matrix)))
        return torch.zeros_like(matrix, memory_format=torch.contiguous_format)

    def sample(self) -> Tensor:
        return self.in_planes(self.planes(-math.pi, math.pi))

    def start(self) -> Tensor:
        self.base.copy_(matrix_exp(self.skew(double(self.sample()))))
        return torch.zeros(*self.batch, self.n, self.n, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def move_base(self, x: Tensor) -> None:
        """Moves B to B exp(A) and sets ``x`` to 0 in place: the matrix stays, to rounding."""
        base = double(self.base) @ matrix_exp(self.skew(double(x)))
        # Polished, so that rounding does not add up over many moves.
        self.base.copy_(polished(base))
        x.zero_()


def move_bases(model: nn.Module) -> list[nn.Parameter]:
    r"""Moves the base of every "dtriv" weight in a model to where the weight is, and its free parameter to 0.

    Call it after every K-th step of the optimiser. What the optimiser remembers of these parameters (momentum, second
    moments) was measured from the old base: drop it as below, or keep it as an approximation.

    Args:
        model: a module and all within it, changed in place. Its weights stay as they are, to rounding.

    Returns:
        The free parameters that were set to 0.

    Example:
        >>> from cwy import orthogonal
        >>> model = orthogonal(torch.nn.Linear(4, 4), method="dtriv")
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> for step in range(6):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(8, 4)).square().sum().backward()
        ...     optimizer.step()
        ...     if step % 2:
        ...         for moved in move_bases(model):
        ...             _ = optimizer.state.pop(moved, None)
        >>> orthogonality_error(model.weight) < 1e-5
        True
    """
    moved = []
    for layer in model.modules():
        if parametrize.is_parametrized(layer):
            for chain in cast(nn.ModuleDict, layer.parametrizations).values():
                first = cast(parametrize.ParametrizationList, chain)[0]
                if isinstance(first, DTRIV):
                    x = cast(nn.Parameter, chain.original)
                    first.move_base(x)
                    moved.append(x)
    return moved
