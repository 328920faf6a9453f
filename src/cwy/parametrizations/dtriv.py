"""DTRIV: the matrix exponential from a base that moves."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from ..ops._linalg import double, multiply, nearest_orthogonal
from ..ops.skew import matrix_exp, polished
from ..registry import register
from .constraints import named_constraints
from .skew import SkewMap


@register(
    "dtriv", domain="SO(N): the component of its base", kind="square", paper="Lezcano-Casado 2019"
)
class DTRIV(SkewMap):
    r"""Compute $Q = B\exp(A)$, $A = \mathrm{striu}(X) - \mathrm{striu}(X)^\top$, with a base B.

    This is dynamic trivialization: every K steps :func:`move_bases` moves the base B to
    $B\exp(A)$ and X to 0. The exponential is then only used near 0, where it distorts the gradient
    least. K = ∞ is never to call it. Costs what EXPRNN costs, and a product.

    B is a buffer, kept in the state dict. It starts as block-diagonal rotations with angles uniform
    in $[-\pi, \pi]$, and X starts as 0. Any orthogonal Q can be assigned: it becomes B. The
    determinant is always that of B.

    Args:
        n, m: N. ``m``, if given, is N too.
        batch, dtype, device: of the weight, real.

    Example:
        >>> q = DTRIV(6)
        >>> x = torch.randn(6, 6)
        >>> before = q(x)
        >>> q.move_base(x)
        >>> torch.allclose(q(x), before, atol=1e-5), x.any().item()
        (True, False)
    """

    stacked_buffers = ("base",)

    base: Tensor

    def __init__(self, n: int, m: int | None = None, **like) -> None:
        super().__init__(n, m, **like)
        # The base is at least float32. Rounded to half precision it would not be orthogonal.
        dtype = torch.promote_types(self.dtype, torch.float32)
        base = torch.eye(n, dtype=dtype, device=self.device).repeat(*self.batch, 1, 1)
        self.register_buffer("base", base)

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
        """Move B to B exp(A) and set ``x`` to 0 in place. The matrix stays, to rounding."""
        base = double(self.base) @ matrix_exp(self.skew(double(x)))
        # Polished, so that rounding does not add up over many moves.
        self.base.copy_(polished(base))
        x.zero_()


def move_bases(model: nn.Module) -> list[nn.Parameter]:
    r"""Move the base of every "dtriv" weight to where the weight is, and its free parameter to 0.

    Call it after every K-th step of the optimizer. The optimizer's state of these parameters
    (momentum, second moments) belongs to the old base. Drop it as below, or keep it as an
    approximation.

    Args:
        model: a module and all within it, changed in place. Its weights stay, to rounding.

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
    for layer, name, chart, free in named_constraints(model):
        if not isinstance(chart, DTRIV):
            continue
        chain = cast(nn.ModuleDict, layer.parametrizations)[name]
        # The free parameter belongs to the first map of a chain.
        if cast(nn.ModuleList, chain)[0] is chart:
            x = cast(nn.Parameter, free[0])
            chart.move_base(x)
            moved.append(x)
    return moved
