"""The Cayley map and its derivative."""

import torch
from torch import Tensor
from torch.autograd import Function

from ..._torch import below_autograd, transform_is_active
from .._library import define
from .._linalg import multiply


def cayley(a: Tensor) -> Tensor:
    r"""Compute $(I + A/2)^{-1}(I - A/2)$ of ``a (*, N, N)``.

    For a skew-symmetric A the result is orthogonal and has no eigenvalue -1.

    Example:
        >>> x = torch.randn(5, 5, dtype=torch.float64)
        >>> orthogonality_error(cayley(x - x.mT)) < 1e-12
        True
    """
    if transform_is_active():
        return _cayley(a)
    return _cayley_op(a)


def _cayley(a: Tensor) -> Tensor:
    # I + A/2 is never singular, so solve_ex needs no check, which would synchronize with the host.
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return torch.linalg.solve_ex(eye + a / 2, eye - a / 2).result


def _cayley_derivative(q: Tensor, da: Tensor) -> Tensor:
    r"""Compute $-W\,dA\,W$ with $W = (I + A/2)^{-1} = (I + Q)/2$.

    Two products are faster than solving again.
    """
    w = (q + torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)) / 2
    return -multiply(multiply(w, da), w)


class _Cayley(Function):
    @staticmethod
    def forward(ctx, a):
        with below_autograd():
            q = torch.ops.cwy.cayley(a)
        ctx.save_for_backward(q)
        ctx.save_for_forward(q)
        return q

    @staticmethod
    def backward(ctx, grad):
        return _cayley_derivative(ctx.saved_tensors[0].mH, grad)

    @staticmethod
    def jvp(ctx, da):
        return _cayley_derivative(ctx.saved_tensors[0], da)


_cayley_op = define(
    "cayley(Tensor a) -> Tensor",
    lambda a: _cayley(a).contiguous(),
    lambda a: a.new_empty(a.shape),
    lambda a: _Cayley.apply(a),
)
