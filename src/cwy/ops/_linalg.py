"""Small linear algebra: wide copies, the distance from orthogonality, the polar factor, triangular matrices."""

import torch
from torch import Tensor
from torch.autograd import Function

from .._torch import has_storage
from ._precision import below_autograd, define, matmul_op, opaque, product
from .checks import check_tensor

# Matrices up to this size are inverted by one triangular solve; larger ones by halves, in products, which are faster.
_BLOCK = {"cpu": 64}
_LEAST = 128  # the size from which halves of a product are faster on a CPU than the whole


def double(x: Tensor) -> Tensor:
    """``x`` in float64 or complex128, without its graph, on a device that has them."""
    x = x.detach()
    return (x.cpu() if x.device.type == "mps" else x).to(
        torch.complex128 if x.is_complex() else torch.float64
    )


def widen(x: Tensor) -> Tensor:
    """``x`` in float64 or complex128, where the device has them."""
    return (
        x if x.device.type == "mps" else x.to(torch.complex128 if x.is_complex() else torch.float64)
    )


def widen_if_cheap(u: Tensor) -> Tensor:
    """``u (*, N, L)`` in float64 on a CPU, or for small L: float32 loses a digit or two on parallel vectors."""
    return widen(u) if u.device.type == "cpu" or u.shape[-1] <= 256 else u


def matrix_error(x: Tensor) -> float:
    r"""Return $\max|X^H X - I|$ of matrices ``x (*, N, M)``, or of their adjoints where they are wide, in float64.

    Args:
        x: the matrix, or a batch of them. The last two dimensions are the matrix.

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
    r"""Return $X^H X - I$ of matrices ``x (*, N, M)``, or of their adjoints where they are wide, in float64.

    Args:
        x: the matrix, or a batch of them.

    Returns:
        ``(*, M, M)``, zero where the matrix has orthonormal columns.

    Example:
        >>> gram_gap(2 * torch.eye(2))
        tensor([[3., 0.],
                [0., 3.]], dtype=torch.float64)
    """
    x = double(x)
    x = x if x.shape[-2] >= x.shape[-1] else x.mH
    gap = x.mH @ x
    gap.diagonal(dim1=-2, dim2=-1).sub_(1)
    return gap


def check_orthonormal(call: str, q: Tensor) -> None:
    """Raises unless ``q (*, N, M)`` is finite and has orthonormal columns, as far as its dtype can tell."""
    if not isinstance(q, Tensor) or (not q.is_nested and q.dim() < 2):
        got = f"shape {tuple(q.shape)}" if isinstance(q, Tensor) else type(q).__name__
        raise ValueError(f"{call}: expected a matrix (*, N, M), got {got}.")
    check_tensor(call, "the matrix", q)
    if q.is_meta:
        raise ValueError(
            f"{call}: a matrix on the meta device has no values. Pass one on a real device."
        )
    if q.shape[-2] < q.shape[-1]:
        raise ValueError(
            f"{call}: expected N >= M, got N = {q.shape[-2]}, M = {q.shape[-1]}. Pass the transpose."
        )
    if not q.isfinite().all():
        raise ValueError(f"{call}: the matrix has NaN or infinite entries.")
    error, tolerance = matrix_error(q), torch.finfo(q.dtype).eps ** 0.5
    # Written so that a NaN is refused.
    if not error <= tolerance:
        raise ValueError(
            f"{call}: the matrix is not orthogonal: max|QᴴQ - I| is {error:.2g}, allowed for {q.dtype} is {tolerance:.2g}. "
            "Orthogonalise it first, e.g. with torch.linalg.qr."
        )


def nearest_orthogonal(q: Tensor) -> Tensor:
    """The orthogonal matrix nearest to ``q (*, N, N)``: its polar factor."""
    u, _, vh = torch.linalg.svd(q, full_matrices=False)
    return u @ vh


def polar(call: str, x: Tensor) -> tuple[Tensor, float]:
    r"""Return the matrix with orthonormal columns nearest to ``x (*, N, M)``, in float64, and its distance from x.

    The distance is $\max_i|\sigma_i - 1|$, in the spectral norm. A matrix of rank below M has no nearest one: that raises.
    """
    if not x.isfinite().all():
        raise ValueError(f"{call}: the matrix has NaN or infinite entries.")
    u, size, vh = torch.linalg.svd(double(x), full_matrices=False)
    least = x.shape[-2] * torch.finfo(x.dtype).eps
    if (size[..., -1] <= least * size[..., 0]).any():
        raise ValueError(
            f"{call}: the weight has a rank below {x.shape[-1]}, so no orthogonal matrix is the nearest. Use init='random'."
        )
    return u @ vh, (size - 1).abs().max().item()


def inverse(s: Tensor) -> Tensor:
    """Inverse of an upper-triangular matrix, in ATen ops; under a compiler, the op ``cwy::triangular_inverse``."""
    return _op(s) if opaque() else _solve(s)


def blocked_inverse(s: Tensor) -> Tensor:
    r"""The same by halves, $T_{12} = -T_{11} S_{12} T_{22}$; not differentiable."""
    t = torch.zeros_like(s)
    _invert_into(t, s, _BLOCK.get(s.device.type, 256))
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
    """``a @ t`` for an upper- (or lower-) triangular t."""
    if not _halved(a, t):
        return product(a, t)
    out = a.new_empty(a.shape[0], t.shape[1])
    _times_into(out, a, t, upper)
    return out


def upper_product(a: Tensor, b: Tensor) -> Tensor:
    """``a.mH @ b`` on and above the diagonal; below it stands anything."""
    if not _halved(a, b):
        return product(a.mH, b)
    out = a.new_empty(a.shape[1], b.shape[1])
    _upper_into(out, a.mH, b)
    return out


def _halved(a: Tensor, b: Tensor) -> bool:
    """Whether a product is cut into halves: one of large matrices on a CPU, which nobody differentiates or batches."""
    large = a.device.type == "cpu" and a.dim() == 2 and b.shape[1] > _LEAST
    # What a vmap goes over, as with is_grads_batched, has no storage, and no rule for results written into a part.
    return large and not torch.is_grad_enabled() and has_storage(a) and has_storage(b)


def _times_into(out: Tensor, a: Tensor, t: Tensor, upper: bool) -> None:
    size = t.shape[1]
    if size <= _LEAST:
        torch.mm(a, t, out=out)
        return
    k = size // 2
    _times_into(out[:, :k], a[:, :k], t[:k, :k], upper)
    _times_into(out[:, k:], a[:, k:], t[k:, k:], upper)
    # Not addmm_, which torch's counter of operations does not know.
    if upper:
        torch.addmm(out[:, k:], a[:, :k], t[:k, k:], out=out[:, k:])
    else:
        torch.addmm(out[:, :k], a[:, k:], t[k:, :k], out=out[:, :k])


def _upper_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    size = b.shape[1]
    if size <= _LEAST:
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


_op = define(
    "triangular_inverse(Tensor s) -> Tensor",
    blocked_inverse,
    lambda s: s.new_empty(s.shape),
    lambda s: _Inverse.apply(s),
)
