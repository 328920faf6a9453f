"""Small linear algebra: products in full precision, wide copies, triangular matrices.

Three functions return ``a @ b``: :func:`matmul` in a forward pass, :func:`product` in a backward
pass, and :func:`multiply` where autograd differentiates the caller.
"""

import functools

import torch
from torch import Tensor
from torch.autograd import Function

from .._torch import below_autograd, has_storage, transform_is_active
from ._library import define, opaque
from .checks import check_tensor

# Matrices up to this size are inverted by one triangular solve. Larger ones are cut in two, because
# products are faster.
_SOLVED = {"cpu": 64}
_SOLVED_ELSEWHERE = 256
# The size from which a product cut in two is faster on a CPU than the whole.
_CUT = 128
# CUDA capabilities with float64 at half the speed of float32 or more.
_FAST_DOUBLE = ((8, 0), (9, 0), (10, 0))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` for equal batch dimensions in a forward pass.

    A compiler gets the op, which holds full precision. Eager callers hold it themselves.
    """
    if opaque():
        return matmul_op(a, b)
    return torch.matmul(a, b)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` for equal batch dimensions in a backward pass.

    Autograd differentiates a recorded backward pass outside of :func:`full_precision`. The op holds
    full precision there too.
    """
    if torch.is_grad_enabled() and not transform_is_active():
        return matmul_op(a, b)
    return a @ b


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` for equal batch dimensions, in full precision forward and backward."""
    if transform_is_active():
        return torch.matmul(a, b)
    return matmul_op(a, b)


class _Matmul(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)
        with below_autograd():
            return torch.ops.cwy.matmul(a, b)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        need_a, need_b = ctx.needs_input_grad
        da = None
        db = None
        if need_a:
            da = matmul_op(grad, b.mH)
        if need_b:
            db = matmul_op(a.mH, grad)
        return da, db

    @staticmethod
    def jvp(ctx, da, db):
        a, b = ctx.saved_tensors
        return matmul_op(da, b) + matmul_op(a, db)


matmul_op = define(
    "matmul(Tensor a, Tensor b) -> Tensor",
    lambda a, b: torch.matmul(a, b).contiguous(),
    lambda a, b: a.new_empty((*a.shape[:-1], b.shape[-1])),
    lambda a, b: _Matmul.apply(a, b),
)


def add_product_(c: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    """Replace c by ``beta c + alpha a @ b``, for matrices or batches of them."""
    if c.dim() == 2:
        return c.addmm_(a, b, beta=beta, alpha=alpha)
    return c.baddbmm_(a, b, beta=beta, alpha=alpha)


def minus_product(a: Tensor, b: Tensor, like: Tensor) -> Tensor:
    """Return ``-a @ b`` for matrices or batches of them, in the shape of ``like``.

    The values of ``like`` are not read.
    """
    if like.dim() == 2:
        return torch.addmm(like, a, b, beta=0, alpha=-1)
    return torch.baddbmm(like, a, b, beta=0, alpha=-1)


def _wide(x: Tensor) -> torch.dtype:
    if x.is_complex():
        return torch.complex128
    return torch.float64


def double(x: Tensor) -> Tensor:
    """Return ``x`` in float64 or complex128, detached, on a device that has them.

    Args:
        x: a tensor of any dtype.

    Returns:
        A tensor of the shape of ``x``, on a CPU if the device of ``x`` lacks float64.

    Example:
        >>> double(torch.ones(2, requires_grad=True))
        tensor([1., 1.], dtype=torch.float64)
    """
    x = x.detach()
    if x.device.type == "mps":
        x = x.cpu()
    return x.to(_wide(x))


def widen(x: Tensor) -> Tensor:
    """Return ``x`` in float64 or complex128 where the device has them."""
    if x.device.type == "mps":
        return x
    return x.to(_wide(x))


def widen_if_cheap(u: Tensor) -> Tensor:
    """Return ``u (*, N, L)`` in float64 on a CPU or for small L.

    float32 loses a digit or two on parallel vectors.
    """
    if u.device.type == "cpu" or u.shape[-1] <= 256:
        return widen(u)
    return u


@functools.cache
def has_fast_double(device: int) -> bool:
    """Return whether a CUDA device computes float64 at half the speed of float32 or more."""
    return torch.cuda.get_device_capability(device) in _FAST_DOUBLE


def matrix_error(x: Tensor) -> float:
    r"""Return $\max|X^H X - I|$ in float64. Wide matrices are transposed first.

    Args:
        x: ``(*, N, M)``, the matrix or a batch of them.

    Returns:
        The largest entry of the difference, over the whole batch.

    Example:
        >>> matrix_error(torch.eye(4).repeat(2, 1, 1))
        0.0
    """
    if x.numel() == 0:
        return 0.0
    return gram_gap(x).abs().max().item()


def gram_gap(x: Tensor) -> Tensor:
    r"""Return $X^H X - I$ in float64. Wide matrices are transposed first.

    Args:
        x: ``(*, N, M)``, the matrix or a batch of them.

    Returns:
        ``(*, M, M)``, zero where the matrix has orthonormal columns.

    Example:
        >>> gram_gap(2 * torch.eye(2))
        tensor([[3., 0.],
                [0., 3.]], dtype=torch.float64)
    """
    x = double(x)
    if x.shape[-2] < x.shape[-1]:
        x = x.mH
    gap = x.mH @ x
    gap.diagonal(dim1=-2, dim2=-1).sub_(1)
    return gap


def check_orthonormal(call: str, q: Tensor) -> None:
    """Raise unless ``q (*, N, M)`` is finite and has orthonormal columns, within its dtype."""
    if not isinstance(q, Tensor):
        raise ValueError(f"{call}: expected a matrix (*, N, M), got {type(q).__name__}.")
    if not q.is_nested and q.dim() < 2:
        raise ValueError(f"{call}: expected a matrix (*, N, M), got shape {tuple(q.shape)}.")
    check_tensor(call, "the matrix", q)
    if q.is_meta:
        raise ValueError(
            f"{call}: a matrix on the meta device has no values. Pass one on a real device."
        )
    n, m = q.shape[-2:]
    if n < m:
        raise ValueError(f"{call}: expected N >= M, got N = {n}, M = {m}. Pass the transpose.")
    _check_finite(call, q)
    error = matrix_error(q)
    tolerance = torch.finfo(q.dtype).eps ** 0.5
    # A NaN must not pass.
    if not error <= tolerance:
        raise ValueError(
            f"{call}: the matrix is not orthogonal: max|QᴴQ - I| is {error:.2g}, "
            f"allowed for {q.dtype} is {tolerance:.2g}. "
            "Orthogonalize it first, e.g. with torch.linalg.qr."
        )


def _check_finite(call: str, x: Tensor) -> None:
    if not x.isfinite().all():
        raise ValueError(f"{call}: the matrix has NaN or infinite entries.")


def nearest_orthogonal(q: Tensor) -> Tensor:
    """Return the polar factor of ``q (*, N, N)``, the nearest orthogonal matrix."""
    u, _, vh = torch.linalg.svd(q, full_matrices=False)
    return u @ vh


def polar(call: str, x: Tensor) -> tuple[Tensor, float]:
    r"""Return the nearest matrix with orthonormal columns, in float64, and its distance.

    The distance is $\max_i|\sigma_i - 1|$, in the spectral norm.

    Args:
        call: the name of the caller, for errors.
        x: ``(*, N, M)``, of rank M.
    """
    _check_finite(call, x)
    u, size, vh = torch.linalg.svd(double(x), full_matrices=False)
    least = x.shape[-2] * torch.finfo(x.dtype).eps
    if (size[..., -1] <= least * size[..., 0]).any():
        raise ValueError(
            f"{call}: the weight has a rank below {x.shape[-1]}, "
            "so no orthogonal matrix is the nearest. Use init='random'."
        )
    return u @ vh, (size - 1).abs().max().item()


def inverse(s: Tensor) -> Tensor:
    """Return the inverse of an upper-triangular matrix. A compiler gets an opaque op."""
    if opaque():
        return _inverse_op(s)
    return _solve(s)


def blocked_inverse(s: Tensor) -> Tensor:
    r"""Return the same by recursion, $T_{12} = -T_{11} S_{12} T_{22}$. It is not differentiable."""
    t = torch.zeros_like(s)
    _invert_into(t, s, _SOLVED.get(s.device.type, _SOLVED_ELSEWHERE))
    return t


def _solve(s: Tensor) -> Tensor:
    wide = widen(s)
    eye = torch.eye(s.shape[-1], dtype=wide.dtype, device=s.device)
    return torch.linalg.solve_triangular(wide, eye.expand_as(wide), upper=True).to(s.dtype)


def _invert_into(t: Tensor, s: Tensor, block: int) -> None:
    size = s.shape[-1]
    if size <= block:
        t.copy_(_solve(s))
        return
    k = size // 2
    _invert_into(t[..., :k, :k], s[..., :k, :k], block)
    _invert_into(t[..., k:, k:], s[..., k:, k:], block)
    t[..., :k, k:] = -(t[..., :k, :k] @ times(s[..., :k, k:], t[..., k:, k:]))


def times(a: Tensor, t: Tensor, upper: bool = True) -> Tensor:
    """Return ``a @ t`` for an upper- (or lower-) triangular t."""
    if not _is_cut(a, t):
        return product(a, t)
    out = a.new_empty(a.shape[0], t.shape[1])
    _times_into(out, a, t, upper)
    return out


def upper_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the upper triangle of ``a.mH @ b``. Entries below the diagonal are unspecified."""
    if not _is_cut(a, b):
        return product(a.mH, b)
    out = a.new_empty(a.shape[1], b.shape[1])
    _upper_into(out, a.mH, b)
    return out


def _is_cut(a: Tensor, b: Tensor) -> bool:
    """Return whether a product is cut in two: of large matrices on a CPU, without derivatives."""
    if a.device.type != "cpu" or a.dim() != 2 or b.shape[1] <= _CUT:
        return False
    if torch.is_grad_enabled():
        return False
    # A tensor inside vmap (also by is_grads_batched) has no storage, and vmap has no rule for
    # results written into a part of a tensor.
    return has_storage(a) and has_storage(b)


def _times_into(out: Tensor, a: Tensor, t: Tensor, upper: bool) -> None:
    size = t.shape[1]
    if size <= _CUT:
        torch.mm(a, t, out=out)
        return
    k = size // 2
    _times_into(out[:, :k], a[:, :k], t[:k, :k], upper)
    _times_into(out[:, k:], a[:, k:], t[k:, k:], upper)
    # torch's counter of operations does not know addmm_.
    if upper:
        torch.addmm(out[:, k:], a[:, :k], t[:k, k:], out=out[:, k:])
    else:
        torch.addmm(out[:, :k], a[:, k:], t[k:, :k], out=out[:, :k])


def _upper_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    size = b.shape[1]
    if size <= _CUT:
        torch.mm(a, b, out=out)
        return
    k = size // 2
    _upper_into(out[:k, :k], a[:k], b[:, :k])
    _upper_into(out[k:, k:], a[k:], b[:, k:])
    torch.mm(a[:k], b[:, k:], out=out[:k, k:])


class _Inverse(Function):
    @staticmethod
    def forward(ctx, s):
        with below_autograd():
            t = torch.ops.cwy.triangular_inverse(s)
        ctx.save_for_backward(t)
        ctx.save_for_forward(t)
        return t

    @staticmethod
    def backward(ctx, grad):
        (t,) = ctx.saved_tensors
        return -matmul_op(t.mH, matmul_op(grad, t.mH)).triu()

    @staticmethod
    def jvp(ctx, ds):
        (t,) = ctx.saved_tensors
        return -matmul_op(matmul_op(t, ds.triu()), t)


_inverse_op = define(
    "triangular_inverse(Tensor s) -> Tensor",
    blocked_inverse,
    lambda s: s.new_empty(s.shape),
    lambda s: _Inverse.apply(s),
)
