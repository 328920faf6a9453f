r"""The two classical maps from skew-symmetric to orthogonal matrices, and the logarithm back.

Each map is one ``torch.library`` op that holds full precision forward and backward, compiled or not. Transforms of
``torch.func`` see through ATen ops alone, so there it is the ATen function itself.
"""

import math

import torch
from torch import Tensor
from torch.autograd import Function

from .exponential import LARGEST, exponential
from .precision import below_autograd, define, matmul_op


def matrix_exp(a: Tensor) -> Tensor:
    r"""$\exp(A)$ of ``a (*, N, N)``: orthogonal, of determinant 1, for a skew-symmetric A.

    Example:
        >>> x = torch.randn(5, 5, dtype=torch.float64)
        >>> orthogonality_error(matrix_exp(x - x.mT)) < 1e-12
        True
    """
    return torch.linalg.matrix_exp(a) if _transformed() else _matrix_exp_op(a)


def cayley(a: Tensor) -> Tensor:
    r"""$(I + A/2)^{-1}(I - A/2)$ of ``a (*, N, N)``: orthogonal, without eigenvalue -1, for a skew-symmetric A.

    Example:
        >>> x = torch.randn(5, 5, dtype=torch.float64)
        >>> orthogonality_error(cayley(x - x.mT)) < 1e-12
        True
    """
    return _cayley(a) if _transformed() else _cayley_op(a)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` for equal batch dimensions, in full precision forward and backward."""
    return torch.matmul(a, b) if _transformed() else matmul_op(a, b)


def polished(q: Tensor) -> Tensor:
    r"""$Q + Q(I - Q^\top Q)/2$, a Newton-Schulz step: takes what rounding has left in ``q (*, N, N)`` off to first order.

    That is as small as rounding and normal to the group, so the derivative is taken to be q's own.

    Example:
        >>> q = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q + 1e-6 * torch.randn(5, 5, dtype=torch.float64)
        >>> orthogonality_error(polished(q)) < 1e-9
        True
    """
    known = q.detach()
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    return q + multiply(known, eye - multiply(known.mT, known)) / 2


def logarithm(q: Tensor) -> Tensor:
    r"""A skew-symmetric A with $\exp(A) = Q$ and no angle above $\pi$, for a Q in SO(N).

    Backward stable for every Q: repeated angles, eigenvalues -1 and matrices near the identity are no harder.

    Args:
        q: ``(*, N, N)``, float64, orthogonal to rounding, of determinant 1.

    Returns:
        ``(*, N, N)``, exactly skew-symmetric.

    Example:
        >>> q = torch.eye(5, dtype=torch.float64).roll(1, 0)
        >>> torch.allclose(matrix_exp(logarithm(q)), q)
        True
    """
    n = q.shape[-1]
    return torch.stack([_logarithm(one) for one in q.reshape(-1, n, n)]).reshape(q.shape)


def _transformed() -> bool:
    return torch._C._are_functorch_transforms_active()


def _logarithm(q: Tensor) -> Tensor:
    # Planes turned by nearly π, where the logarithm jumps, are split off at the widest gap of the negative cosines.
    cosine, basis = torch.linalg.eigh((q + q.mT) / 2)
    negative = torch.cat([cosine.new_tensor([-1.0]), cosine[cosine < 0], cosine.new_tensor([0.0])])
    k = int(negative.diff().argmax())
    near, far = basis[:, :k], basis[:, k:]
    a = far @ _principal(far.mT @ q @ far) @ far.mT
    if k:
        b = _principal(-(near.mT @ q @ near))
        a = a + near @ (b - math.pi * _quarter_turn(b)) @ near.mT
    return (a - a.mT) / 2


def _principal(q: Tensor) -> Tensor:
    r"""The logarithm of an orthogonal matrix without eigenvalues near -1.

    The inverse Cayley transform is skew, with eigenvalues $-i\tan(\theta/2)$: one Hermitian eigenproblem, in which
    distinct angles stay distinct and equal ones may mix freely.
    """
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    t = torch.linalg.solve(eye + q, eye - q)
    tangent, p = torch.linalg.eigh(1j * (t - t.mT) / 2)
    return ((p * (2j * tangent.atan())) @ p.mH).real


def _quarter_turn(b: Tensor) -> Tensor:
    r"""A real skew J with $J^2 = -I$ that commutes with a skew b of even size and turns its planes the way b does."""
    u, size, vh = torch.linalg.svd(b)
    # Singular values come in pairs. In planes that b leaves still, any J commutes.
    rank = int((size > 1e-12).sum()) // 2 * 2
    one, other = vh[rank::2], vh[rank + 1 :: 2]
    j = u[:, :rank] @ vh[:rank] + one.mT @ other - other.mT @ one
    u, _, vh = torch.linalg.svd(j - j.mT)
    return u @ vh


def _matrix_exp(a: Tensor) -> Tensor:
    if a.is_cuda and a.shape[-1] <= LARGEST and _no_waiting():
        return exponential(a)  # launched one by one, its many products are slower than torch's
    return torch.linalg.matrix_exp(a).contiguous()


def _no_waiting() -> bool:
    """Whether the host may not wait for the GPU: in a recording, or because torch was told that it is an error."""
    return torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode() == 2


def _cayley(a: Tensor) -> Tensor:
    # I + A/2 is never singular, so nothing need be checked, and no device waited for.
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return torch.linalg.solve_ex(eye + a / 2, eye - a / 2).result


def _exp_derivative(a: Tensor, da: Tensor) -> Tensor:
    r"""The corner of $\exp\begin{bmatrix} A & dA \\ 0 & A \end{bmatrix}$."""
    # It is linear in dA, but a large dA would cost squarings, and with each of them accuracy: so it is made small.
    scale = 100 * torch.linalg.matrix_norm(da.detach(), 1, keepdim=True)
    scale = torch.where(scale > 0, scale, 1)
    top, bottom = torch.cat([a, da / scale], -1), torch.cat([torch.zeros_like(a), a], -1)
    return matrix_exp(torch.cat([top, bottom], -2))[..., : a.shape[-1], a.shape[-1] :] * scale


def _cayley_derivative(q: Tensor, da: Tensor) -> Tensor:
    r"""$-W\,dA\,W$ with $W = (I + A/2)^{-1} = (I + Q)/2$: two products, where solving again would be slower."""
    w = (q + torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)) / 2
    return -multiply(multiply(w, da), w)


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


_matrix_exp_op = define(
    "matrix_exp(Tensor a) -> Tensor",
    _matrix_exp,
    lambda a: a.new_empty(a.shape),
    lambda a: _MatrixExp.apply(a),
)
_cayley_op = define(
    "cayley(Tensor a) -> Tensor", lambda a: _cayley(a).contiguous(), lambda a: a.new_empty(a.shape), lambda a: _Cayley.apply(a)
)
