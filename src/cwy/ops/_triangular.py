"""Triangular matrices: the inverse, accurate for parallel vectors too, and products that leave zeros out."""

import torch
from torch import Tensor
from torch.autograd import Function

from ._precision import below_autograd, define, matmul_op, opaque, product

# Matrices up to this size are inverted by one triangular solve; larger ones by halves, in products, which are faster.
_BLOCK = {"cpu": 64}
_LEAST = 128  # the size from which halves of a product are faster on a CPU than the whole


def widen(x: Tensor) -> Tensor:
    """``x`` in float64 or complex128, where the device has them."""
    return (
        x if x.device.type == "mps" else x.to(torch.complex128 if x.is_complex() else torch.float64)
    )


def widen_if_cheap(u: Tensor) -> Tensor:
    """``u (*, N, L)`` in float64 on a CPU, or for small L: float32 loses a digit or two on parallel vectors."""
    return widen(u) if u.device.type == "cpu" or u.shape[-1] <= 256 else u


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
    return (
        large
        and not torch.is_grad_enabled()
        and torch._C._has_storage(a)
        and torch._C._has_storage(b)
    )


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
