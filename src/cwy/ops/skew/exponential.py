"""The matrix exponential as an op, with its derivatives."""

import math

import torch
from torch import Tensor
from torch.autograd import Function

from ..._torch import below_autograd, transform_is_active
from .._library import define
from .._linalg import multiply, widen_if_cheap
from .capturable import LARGEST
from .frechet import Pair, exponential_and_slope, largest_norm, widened


def matrix_exp(a: Tensor) -> Tensor:
    r"""Compute $\exp(A)$ of ``a (*, N, N)``, which is orthogonal for a skew-symmetric A.

    float32 is computed in float64 where the device does that fast, and rounded at the end.

    Raises:
        ValueError: if the norm of A is above $\mathrm{eps}^{-1/2}$ (6.7e7 in float64), where
            rounding spoils the result. In a CUDA graph and under a transform the result is NaN.

    Example:
        >>> x = torch.randn(5, 5, dtype=torch.float64)
        >>> orthogonality_error(matrix_exp(x - x.mT)) < 1e-12
        True
    """
    if not transform_is_active():
        return _matrix_exp_op(a)
    wide = widen_if_cheap(a)
    near = torch.linalg.matrix_norm(wide.detach(), 1) <= largest_norm(wide.dtype)
    result = torch.where(near[..., None, None], torch.linalg.matrix_exp(wide), math.nan)
    return result.to(a.dtype)


def rotation(a: Tensor) -> Tensor:
    r"""Compute $\exp(A)$ of a skew-symmetric ``a (*, N, N)``, orthogonal to rounding.

    Example:
        >>> x = 100 * torch.randn(50, 50)
        >>> orthogonality_error(rotation(x - x.mT)) < 1e-6
        True
    """
    q = matrix_exp(a)
    # On a CPU float32 is rounded from float64 and needs no polish. Meta tensors count operations,
    # as on a CPU.
    if a.dtype == torch.float32 and a.device.type in ("cpu", "meta"):
        return q
    return polished(q)


def polished(q: Tensor) -> Tensor:
    r"""Compute $Q + Q(I - Q^\top Q)/2$, a Newton-Schulz step toward an orthogonal ``q (*, N, N)``.

    The change is as small as rounding and normal to the group, so the derivative is that of q.

    Example:
        >>> q = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q
        >>> q = q + 1e-6 * torch.randn(5, 5, dtype=torch.float64)
        >>> orthogonality_error(polished(q)) < 1e-9
        True
    """
    known = q.detach()
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    return q + multiply(known, eye - multiply(known.mT, known)) / 2


def _matrix_exp(a: Tensor) -> Tensor:
    return _exponential(a, None).value.reshape(a.shape).to(a.dtype)


def _matrix_exp_slope(a: Tensor, da: Tensor) -> Tensor:
    slope = _exponential(a, da).slope
    assert slope is not None
    return slope.reshape(a.shape).to(a.dtype)


def _exponential(a: Tensor, da: Tensor | None) -> Pair:
    n = a.shape[-1]
    waiting = not (a.is_cuda and n <= LARGEST and _may_not_synchronize())
    tolerance = torch.finfo(a.dtype).eps / 16
    if a.dim() > 3:
        a = a.reshape(-1, n, n)
    if da is not None:
        da = widened(da.reshape(a.shape))
    return exponential_and_slope(widened(a), da, tolerance, waiting)


def _may_not_synchronize() -> bool:
    """Return whether host synchronization fails: in a graph capture, or in torch's debug mode."""
    return torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode() == 2


def _exp_derivative(a: Tensor, da: Tensor) -> Tensor:
    r"""Compute $L(A, dA)$, which is linear in dA."""
    if not transform_is_active():
        return _matrix_exp_slope_op(a, da)
    scale = _largest_entry(da)
    blocks = widen_if_cheap(_blocks(a, da / scale))
    return _corner(torch.linalg.matrix_exp(blocks)).to(a.dtype) * scale


def _blocks(a: Tensor, da: Tensor) -> Tensor:
    r"""Return $\begin{bmatrix} A & dA \\ 0 & A \end{bmatrix}$.

    The corner of its exponential is $L(A, dA)$.
    """
    top = torch.cat([a, da], -1)
    bottom = torch.cat([torch.zeros_like(a), a], -1)
    return torch.cat([top, bottom], -2)


def _largest_entry(da: Tensor) -> Tensor:
    """Return the largest entry of each matrix, or 1 for a zero matrix.

    Dividing a large dA by it saves digits.
    """
    with torch.no_grad():
        size = da.abs().amax((-2, -1), keepdim=True)
        return torch.where(size > 0, size, 1)


def _corner(blocks: Tensor) -> Tensor:
    n = blocks.shape[-1] // 2
    return blocks[..., :n, n:]


class _MatrixExp(Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        ctx.save_for_forward(a)
        with below_autograd():
            return torch.ops.cwy.matrix_exp(a)

    @staticmethod
    def backward(ctx, grad):
        return _exp_derivative(ctx.saved_tensors[0].mH, grad)

    @staticmethod
    def jvp(ctx, da):
        return _exp_derivative(ctx.saved_tensors[0], da)


class _MatrixExpSlope(Function):
    r"""Differentiate $L(A, dA)$ as the corner of an exponential of twice the size."""

    @staticmethod
    def forward(ctx, a, da):
        ctx.save_for_backward(a, da)
        ctx.save_for_forward(a, da)
        with below_autograd():
            return torch.ops.cwy.matrix_exp_slope(a, da)

    @staticmethod
    def backward(ctx, grad):
        a, da = ctx.saved_tensors
        n = a.shape[-1]
        scale = _largest_entry(da)
        blocks = _exp_derivative(_blocks(a, da / scale).mH, _blocks(torch.zeros_like(a), grad))
        return (blocks[..., :n, :n] + blocks[..., n:, n:]) * scale, _corner(blocks)

    @staticmethod
    def jvp(ctx, a_dot, da_dot):
        a, da = ctx.saved_tensors
        scale = _largest_entry(da)
        blocks = _exp_derivative(_blocks(a, da / scale), _blocks(a_dot, da_dot / scale))
        return _corner(blocks) * scale


_matrix_exp_op = define(
    "matrix_exp(Tensor a) -> Tensor",
    _matrix_exp,
    lambda a: a.new_empty(a.shape),
    lambda a: _MatrixExp.apply(a),
)
_matrix_exp_slope_op = define(
    "matrix_exp_slope(Tensor a, Tensor da) -> Tensor",
    _matrix_exp_slope,
    lambda a, da: a.new_empty(a.shape),
    lambda a, da: _MatrixExpSlope.apply(a, da),
)
