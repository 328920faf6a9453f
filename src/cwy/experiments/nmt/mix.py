"""The pointwise part of a gated cell, as one kernel each way on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..._torch import pointwise_kernel
from ...ops.recurrence.nonlinearities import SLOPE


class Formula(NamedTuple):
    """Hold a nonlinearity and its derivative in CUDA C++.

    Attributes:
        value: the nonlinearity of ``a``.
        slope: its derivative, from its value ``f``.
    """

    value: str
    slope: str


FORMULAS = {
    "tanh": Formula("::tanh(a)", "T(1) - f * f"),
    "relu": Formula("a < T(0) ? T(0) : a", "f > T(0) ? T(1) : T(0)"),
    "leaky_relu": Formula(f"a < T(0) ? T({SLOPE}) * a : a", f"f > T(0) ? T(1) : T({SLOPE})"),
}
"""The nonlinearities that the kernels know."""

FORWARD = """
template <typename T>
void mix(T x, T x_gate, T r, T factor, T h, T& out, T& f, T& z) {{
  const T a = x + r;
  f = {value};
  z = T(1) / (T(1) + ::exp(-(x_gate + factor * r)));
  out = h + z * (f - h);
}}
"""
BACKWARD = """
template <typename T>
void mix_backward(
    T d, T h, T f, T z, T r, T factor, T& to_x, T& to_gate, T& to_r, T& to_factor, T& to_h) {{
  to_x = d * z * ({slope});
  to_gate = d * (f - h) * z * (T(1) - z);
  to_r = to_x + factor * to_gate;
  to_factor = r * to_gate;
  to_h = d * (T(1) - z);
}}
"""


class _Kernels(NamedTuple):
    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]


@functools.cache
def _kernels(nonlinearity: str) -> _Kernels:
    formula = FORMULAS[nonlinearity]
    return _Kernels(
        forward=pointwise_kernel(FORWARD.format(value=formula.value), 3),
        backward=pointwise_kernel(BACKWARD.format(slope=formula.slope), 5),
    )


class _Mix(Function):
    @staticmethod
    def forward(ctx, x, x_gate, r, factors, h, kernels):
        out, f, z = kernels.forward(x, x_gate, r, factors, h)
        ctx.save_for_backward(h, f, z, r, factors)
        ctx.kernels = kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        h, f, z, r, factors = ctx.saved_tensors
        to_x, to_gate, to_r, to_factors, to_h = ctx.kernels.backward(grad, h, f, z, r, factors)
        return to_x, to_gate, to_r, to_factors, to_h, None


class Mix:
    r"""Compute $(1 - z) \odot h + z \odot f(x + r)$ with $z = \sigma(x_z + d \odot r)$.

    Args:
        factors: d ``(N,)``.
        nonlinearity: the name of f.
    """

    def __init__(self, factors: Tensor, nonlinearity: str) -> None:
        self._factors = factors
        self._nonlinearity = nonlinearity
        self._rows: Tensor | None = None

    def serves(self, h: Tensor) -> bool:
        """Return whether the kernels take such states."""
        return h.is_cuda and self._nonlinearity in FORMULAS

    def __call__(self, x: Tensor, r: Tensor, h: Tensor) -> Tensor:
        """Return the next state ``(B, N)``. x ``(B, 2 N)`` has the cell's and the gate's input."""
        if self._rows is None or self._rows.shape != h.shape:
            # Shared by all steps: their gradients are added before the rows are.
            self._rows = self._factors.expand(h.shape)
        x_new, x_gate = x.chunk(2, -1)
        kernels = _kernels(self._nonlinearity)
        return _Mix.apply(x_new, x_gate, r, self._rows, h, kernels)
