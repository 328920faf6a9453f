"""The pointwise part of a gated cell, as one kernel each way on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ...ops import _nvrtc
from ...ops.recurrence.nonlinearities import SLOPE

SOURCE = Path(__file__).parent / "kernels" / "mix.cu"
NUMBERS = {"tanh": 0, "relu": 1, "leaky_relu": 2}
"""The nonlinearities that the kernels know, as their source compares them."""
_THREADS = 256


def macros(nonlinearity: str) -> dict[str, int | float]:
    """Return the constants of the source for a nonlinearity."""
    names = {name.upper(): number for name, number in NUMBERS.items()}
    return {**names, "NONLINEARITY": NUMBERS[nonlinearity], "SLOPE": SLOPE}


class Mix:
    r"""Compute $(1 - z) \odot h + z \odot f(x + c + r)$ with $z = \sigma(x_z + d \odot r)$.

    Args:
        factors: d ``(N,)``.
        nonlinearity: the name of f.
    """

    def __init__(self, factors: Tensor, nonlinearity: str) -> None:
        self.factors = factors
        self._nonlinearity = nonlinearity
        self._rows: Tensor | None = None

    def serves(self, h: Tensor) -> bool:
        """Return whether the kernels take such states."""
        if not h.is_cuda or h.dtype != torch.float32 or h.numel() == 0 or torch.version.hip:
            return False
        return self._nonlinearity in NUMBERS and _nvrtc.why_not() is None

    def __call__(self, x: Tensor, context: Tensor | None, r: Tensor, h: Tensor) -> Tensor:
        """Return the next state.

        Args:
            x: the inputs of the cell and of its gate, ``(B, 2 N)``.
            context: c ``(B, N)``, or None.
            r: Q h, ``(B, N)``.
            h: the state, ``(B, N)``.
        """
        if self._rows is None or self._rows.shape != h.shape:
            # Shared by all steps: their gradients are added before the rows are.
            self._rows = self.factors.expand(h.shape)
        if context is not None:
            context = context.to(h.dtype)
        return _Mix.apply(x, context, r, self._rows, h, self._nonlinearity)


class _Mix(Function):
    @staticmethod
    def forward(ctx, x, context, r, factors, h, nonlinearity):
        x = x.contiguous()
        h = h.contiguous()
        if context is not None:
            context = context.contiguous()
        if r.stride(-1) != 1:
            r = r.contiguous()
        out = torch.empty_like(h)
        value = torch.empty_like(h)
        gate = torch.empty_like(h)
        launch = _prepared("forward", nonlinearity, h.numel(), h.get_device())
        launch(x, context, r, factors, h, out, value, gate, h.shape[-1], r.stride(0), h.numel())
        ctx.save_for_backward(h, value, gate, r, factors)
        ctx.nonlinearity = nonlinearity
        ctx.has_context = context is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        h, value, gate, r, factors = ctx.saved_tensors
        rows, n = h.shape
        grad = grad.contiguous()
        to_x = h.new_empty(rows, 2 * n)
        to_r = torch.empty_like(h)
        to_factors = torch.empty_like(h)
        to_h = torch.empty_like(h)
        launch = _prepared("backward", ctx.nonlinearity, h.numel(), h.get_device())
        results = (to_x, to_r, to_factors, to_h)
        launch(grad, h, value, gate, r, factors, *results, n, r.stride(0), h.numel())
        to_context = None
        if ctx.has_context:
            to_context = to_x[:, :n]
        return to_x, to_context, to_r, to_factors, to_h, None


@functools.lru_cache(maxsize=256)
def _prepared(name: str, nonlinearity: str, size: int, device: int) -> Callable[..., None]:
    with torch.cuda.device(device):
        kernel = _nvrtc.kernel(SOURCE, name, macros(nonlinearity))
        return kernel.prepare((-(-size // _THREADS), 1), _THREADS)
