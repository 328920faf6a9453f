r"""The two classical maps from skew-symmetric to orthogonal matrices, and the logarithm back.

Each map is one ``torch.library`` op that holds full precision forward and backward, compiled or not. Transforms of
``torch.func`` see through ATen ops alone, so there it is the ATen function itself.
"""

import math

import torch
from torch import Tensor
from torch.autograd import Function

from .._torch import transform_is_active
from ._linalg import widen_if_cheap
from ._precision import below_autograd, define, matmul_op
from .exponential import LARGEST
from .frechet import Pair, exponential_and_slope, largest_norm, widened


def matrix_exp(a: Tensor) -> Tensor:
    r"""Compute $\exp(A)$ of ``a (*, N, N)``: orthogonal, of determinant 1, for a skew-symmetric A.

    float32 is computed in float64 on a CPU, and on GPUs that have it at a fair speed, and rounded at the end.

    Raises:
        ValueError: if the norm of A is above $\mathrm{eps}^{-1/2}$ (6.7e7 in float64), where rounding spoils the result.
            In a CUDA graph and under a transform the result is NaN.

    Example:
        >>> x = torch.randn(5, 5, dtype=torch.float64)
        >>> orthogonality_error(matrix_exp(x - x.mT)) < 1e-12
        True
    """
    if _transformed():
        wide = widen_if_cheap(a)
        near = torch.linalg.matrix_norm(wide.detach(), 1) <= largest_norm(wide.dtype)
        return torch.where(near[..., None, None], torch.linalg.matrix_exp(wide), math.nan).to(
            a.dtype
        )
    return _matrix_exp_op(a)


def rotation(a: Tensor) -> Tensor:
    r"""Compute $\exp(A)$ of a skew-symmetric ``a (*, N, N)``, orthogonal to rounding.

    Example:
        >>> x = 100 * torch.randn(50, 50)
        >>> orthogonality_error(rotation(x - x.mT)) < 1e-6
        True
    """
    q = matrix_exp(a)
    # On a CPU float32 is rounded from float64, with nothing left to polish. Meta tensors count operations as a CPU's do.
    if a.dtype == torch.float32 and a.device.type in ("cpu", "meta"):
        return q
    return polished(q)


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
    return transform_is_active()


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
    return _exponential(a, None).value.reshape(a.shape).to(a.dtype)


def _matrix_exp_slope(a: Tensor, da: Tensor) -> Tensor:
    slope = _exponential(a, da).slope
    assert slope is not None
    return slope.reshape(a.shape).to(a.dtype)


def _exponential(a: Tensor, da: Tensor | None) -> Pair:
    n = a.shape[-1]
    waiting = not (a.is_cuda and n <= LARGEST and _no_waiting())
    tolerance = torch.finfo(a.dtype).eps / 16
    if a.dim() > 3:
        a = a.reshape(-1, n, n)
        da = None if da is None else da.reshape(-1, n, n)
    wide = None if da is None else widened(da)
    return exponential_and_slope(widened(a), wide, tolerance, waiting)


def _no_waiting() -> bool:
    """Whether the host may not wait for the GPU: in a recording, or because torch was told that it is an error."""
    return torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode() == 2


def _cayley(a: Tensor) -> Tensor:
    # I + A/2 is never singular, so nothing need be checked, and no device waited for.
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return torch.linalg.solve_ex(eye + a / 2, eye - a / 2).result


def _exp_derivative(a: Tensor, da: Tensor) -> Tensor:
    r"""Compute $L(A, dA)$, which is linear in dA."""
    if not _transformed():
        return _matrix_exp_slope_op(a, da)
    scale = _size(da)
    blocks = widen_if_cheap(_blocks(a, da / scale))
    return _corner(torch.linalg.matrix_exp(blocks)).to(a.dtype) * scale


def _blocks(a: Tensor, da: Tensor) -> Tensor:
    r"""Return $\begin{bmatrix} A & dA \\ 0 & A \end{bmatrix}$, whose exponential has $L(A, dA)$ in its corner."""
    top = torch.cat([a, da], -1)
    bottom = torch.cat([torch.zeros_like(a), a], -1)
    return torch.cat([top, bottom], -2)


def _size(da: Tensor) -> Tensor:
    """Return the largest entry of each matrix, by which what is linear in dA is divided: a large dA would cost digits."""
    with torch.no_grad():
        size = da.abs().amax((-2, -1), keepdim=True)
        return torch.where(size > 0, size, 1)


def _corner(blocks: Tensor) -> Tensor:
    n = blocks.shape[-1] // 2
    return blocks[..., :n, n:]


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


class _MatrixExpSlope(Function):
    r"""$L(A, dA)$, differentiated as the corner of an exponential of twice the size."""

    @staticmethod
    def forward(ctx, a, da):
        ctx.save_for_backward(a, da)
        ctx.save_for_forward(a, da)
        with below_autograd():
            return torch.ops.cwy.matrix_exp_slope(a, da)

    @staticmethod
    def backward(ctx, grad):
        a, da = ctx.saved_tensors
        n, scale = a.shape[-1], _size(da)
        blocks = _exp_derivative(_blocks(a, da / scale).mH, _blocks(torch.zeros_like(a), grad))
        return (blocks[..., :n, :n] + blocks[..., n:, n:]) * scale, _corner(blocks)

    @staticmethod
    def jvp(ctx, a_dot, da_dot):
        a, da = ctx.saved_tensors
        scale = _size(da)
        return (
            _corner(_exp_derivative(_blocks(a, da / scale), _blocks(a_dot, da_dot / scale))) * scale
        )


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
_matrix_exp_slope_op = define(
    "matrix_exp_slope(Tensor a, Tensor da) -> Tensor",
    _matrix_exp_slope,
    lambda a, da: a.new_empty(a.shape),
    lambda a, da: _MatrixExpSlope.apply(a, da),
)
_cayley_op = define(
    "cayley(Tensor a) -> Tensor",
    lambda a: _cayley(a).contiguous(),
    lambda a: a.new_empty(a.shape),
    lambda a: _Cayley.apply(a),
)
