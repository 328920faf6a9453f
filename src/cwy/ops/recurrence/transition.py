r"""The transition as the loop sees it: formed, as $\mathrm{diag}(d) - W Y^H$, or a convolution.

Rows are vectors, ``h (B, N)``, or images, ``h (B, C, H, W)``. Each has ``step`` ($x + Qh$), ``back`` ($g + Q^H\delta$) and
``grad``, the gradient of its tensors from all deltas and the states before them, in one call each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d, conv_transpose2d, linear

from .._linalg import widen
from .._precision import of_convolutions

NARROW = (
    32  # numbers a row up to which sums over all rows are added up in float64, which costs little
)


def summed(a: Tensor, b: Tensor) -> Tensor:
    r"""$\sum_k a_k b_k^H$ over rows. Of few columns a long sum in float32 would lose digits that plain steps keep."""
    if max(a.shape[-1], b.shape[-1]) > NARROW:
        return a.mT @ b.conj()
    return (widen(a).mT @ widen(b).conj()).to(a.dtype)


def summed_to(x: Tensor, shape: torch.Size) -> Tensor:
    """The same for a bias: rows added up to its shape."""
    return (
        x.sum_to_size(shape)
        if x.shape[1:].numel() > NARROW
        else widen(x).sum_to_size(shape).to(x.dtype)
    )


class Formed(NamedTuple):
    """Q itself, ``(N, N)``."""

    q: Tensor

    def step(self, x: Tensor, h: Tensor, out: Tensor) -> None:
        torch.addmm(x, h, self.q.mT, out=out)

    def back(self, g: Tensor, delta: Tensor, out: Tensor) -> None:
        torch.addmm(g, delta, self.q.conj(), out=out)

    def grad(self, deltas: Tensor, before: Tensor) -> tuple[Tensor, ...]:
        return (summed(deltas, before),)


class Factored(NamedTuple):
    r"""$Q = \mathrm{diag}(d) - W Y^H$: ``w, y (N, L)``, ``d (N,)``."""

    w: Tensor
    y: Tensor
    d: Tensor

    def step(self, x: Tensor, h: Tensor, out: Tensor) -> None:
        torch.addcmul(x, h, self.d, out=out)
        out.addmm_(h @ self.y.conj(), self.w.mT, alpha=-1)

    def back(self, g: Tensor, delta: Tensor, out: Tensor) -> None:
        c = delta @ self.w.conj()
        torch.addcmul(g, delta, self.d.conj(), out=out)
        out.addmm_(c, self.y.mT, alpha=-1)

    def grad(self, deltas: Tensor, before: Tensor) -> tuple[Tensor, ...]:
        return *self._grad(deltas, before), (deltas * before.conj()).sum(0)

    def _grad(self, deltas: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        return -summed(deltas, before @ self.y.conj()), -summed(before, deltas @ self.w.conj())


class Signed(Factored):
    """The same with a diagonal that is not learnt, and gets no gradient."""

    def grad(self, deltas: Tensor, before: Tensor) -> tuple[Tensor | None, ...]:
        return *self._grad(deltas, before), None


class Convolved(NamedTuple):
    """Convolution with a kernel ``(C, C, q, q)``, q odd, of images that are zero beyond their borders."""

    kernel: Tensor

    def step(self, x: Tensor, h: Tensor, out: Tensor) -> None:
        torch.add(x, conv2d(h, self.kernel, padding=half(self.kernel)), out=out)

    def back(self, g: Tensor, delta: Tensor, out: Tensor) -> None:
        torch.add(g, conv_transpose2d(delta, self.kernel, padding=half(self.kernel)), out=out)

    def grad(self, deltas: Tensor, before: Tensor) -> tuple[Tensor, ...]:
        return (kernel_gradient(self.kernel, deltas, before),)


def turned(q: Convolved) -> Convolved:
    """Its adjoint: ``turned(q).step`` is ``q.back``, and the other way round."""
    layout = torch.channels_last if channels_last(q.kernel) else torch.contiguous_format
    return Convolved(q.kernel.transpose(0, 1).flip(-2, -1).contiguous(memory_format=layout))


Step = Callable[..., object]
MANY = 64  # channels from which cuDNN's transposed convolutions are the faster ones, where it does not use tensor cores


def forth(q: Transition, h: Tensor) -> Step:
    """``q.step`` for many steps of states like h: of the two ways to convolve, the one that cuDNN is faster in."""
    if isinstance(q, Convolved) and h.is_cuda and len(q.kernel) >= MANY and not on_tensor_cores(h):
        return turned(q).back
    return q.step


def back(q: Transition, h: Tensor) -> Step:
    """``q.back``, likewise."""
    return (
        turned(q).step if isinstance(q, Convolved) and h.is_cuda and on_tensor_cores(h) else q.back
    )


def on_tensor_cores(x: Tensor) -> bool:
    """Whether images have cuDNN's own layout and it may use tensor cores: it takes them as they lie, with no memory beside."""
    if torch.compiler.is_compiling() or x.dtype == torch.float64 or not channels_last(x):
        return False
    return x.dtype != torch.float32 or of_convolutions() == "tf32"


def channels_last(x: Tensor) -> bool:
    """Whether images lie so in memory. A transform can be asked for strides, not for layouts."""
    # To ask for the strides of an exported program's images would fix their number.
    if x.dim() != 4 or torch.compiler.is_exporting() or x.is_contiguous():
        return False
    _, c, _, w = x.shape
    return x.stride()[1:] == (1, w * c, c)


def flat(x: Tensor) -> Tensor:
    """Images ``(T, B, C, H, W)`` as rows ``(TB, C, H, W)`` that lie in memory as they do."""
    if torch.compiler.is_exporting():
        return x.flatten(0, 1)
    last = x.stride(2) == 1 and x.shape[2] > 1 and not x.is_contiguous()
    return x.movedim(2, -1).flatten(0, 1).movedim(-1, 1) if last else x.flatten(0, 1)


def rows_like(h: Tensor, count: int) -> Tensor:
    """Memory for so many rows, laid out like those of h."""
    layout = torch.channels_last if channels_last(h) else torch.contiguous_format
    return torch.empty((count, *h.shape[1:]), dtype=h.dtype, device=h.device, memory_format=layout)


Matrix = Formed | Factored
Transition = Matrix | Convolved


def of(tensors: list[Tensor]) -> Transition:
    if len(tensors) > 1:
        return Factored(*tensors)
    return Convolved(*tensors) if tensors[0].dim() == 4 else Formed(*tensors)


def half(kernel: Tensor) -> list[int]:
    """The padding with which images keep their size."""
    return [size // 2 for size in kernel.shape[-2:]]


ROWS = 64  # images at once on a GPU: what cuDNN takes beside its operands grows with them


def by_rows(convolve: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """A convolution of images ``(R, C, H, W)`` with a weight, as many at once as serve."""
    if _all_at_once(x, weight) or x.shape[0] <= ROWS:
        return convolve(x)
    return torch.cat([convolve(part) for part in x.split(ROWS)])


def _all_at_once(x: Tensor, weight: Tensor) -> bool:
    # To cut them up, a compiler would have to know how many there are.
    return (
        not x.is_cuda
        or torch.compiler.is_compiling()
        or on_tensor_cores(x)
        or on_tensor_cores(weight)
    )


def kernel_gradient(kernel: Tensor, deltas: Tensor, x: Tensor) -> Tensor:
    """The gradient of a kernel from that of its convolution with x; differentiable."""
    backward = torch.ops.aten.convolution_backward
    rows = max(x.shape[0], 1) if _all_at_once(x, kernel) else ROWS
    parts = [
        backward(
            ours,
            part,
            kernel,
            None,
            [1, 1],
            half(kernel),
            [1, 1],
            False,
            [0, 0],
            1,
            [False, True, False],
        )[1]
        for ours, part in zip(deltas.split(rows), x.split(rows), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def mapped(x: Tensor, weight: Tensor) -> Tensor:
    """The input map: a product with a matrix ``(N, K)``, or a convolution with a kernel ``(C, K, q, q)``."""
    if weight.dim() == 2:
        return linear(x, weight)
    return by_rows(lambda part: conv2d(part, weight, padding=half(weight)), x, weight)


def mapped_back(deltas: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the weight; differentiable."""
    if weight.dim() == 2:
        return deltas @ weight.conj(), deltas.mT @ x.conj()
    back = by_rows(
        lambda part: conv_transpose2d(part, weight, padding=half(weight)), deltas, weight
    )
    return back, kernel_gradient(weight, deltas, x)
