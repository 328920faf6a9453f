"""A recurrence of images: the public function ``conv_rollout``, its transition, and layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import conv2d, conv_transpose2d

from .. import dispatch
from .._precision import of_convolutions
from . import scan
from .spec import (
    Request,
    RolloutSpec,
    check_choices,
    computed_in,
    equal_steps,
    exports_as_scan,
    name_of,
)
from .transition import Formed, LowRank, Step, Transition

MANY_CHANNELS = 64
"""Channels from which cuDNN's transposed convolutions are faster without tensor cores."""
IMAGES_AT_ONCE = 64
"""Images of a convolution on a GPU. The memory that cuDNN takes in addition grows with them."""


def conv_rollout(
    x: Tensor,
    h0: Tensor,
    kernel: Tensor,
    bias: Tensor | None = None,
    nonlinearity: str | Callable[[Tensor], Tensor] = "relu",
    *,
    weight: Tensor | None = None,
    output: str = "all",
    memory: str = "store",
    backend: str = "auto",
) -> tuple[Tensor | None, Tensor]:
    r"""Compute a whole recurrence of images, $h_t = f(K * h_{t-1} + x_t + b)$.

    Images are zero beyond their borders and keep their size. As :func:`~cwy.ops.rollout`, it is
    computed in float32 even under autocast. Whether convolutions may use TF32 is torch's own
    setting. If the images of x, or the weight, are in ``torch.channels_last``, so are the states:
    with TF32 the faster layout on a GPU.

    Args:
        x: ``(T, B, C, H, W)``, what is added at every step.
        h0: ``(B, C, H, W)``, the first states.
        kernel: ``(C, C, q, q)``, q odd.
        bias: ``(C,)`` or None. For "modrelu" it is the threshold.
        nonlinearity: "relu", "modrelu", "abs", "leaky_relu", "tanh", "identity", or a function,
            which takes the slow path.
        weight: ``(C, K, q, q)``, if given, is convolved with x ``(T, B, K, H, W)`` first. With
            memory="checkpoint", a chunk of steps at a time.
        output: "all" states, or only the "last".
        memory: what is kept for the backward pass. "store" keeps every state. "checkpoint" keeps
            $\sqrt T$ of them and computes the rest again.
        backend: "auto", or one of those that ``cwy info`` lists.

    Returns:
        ``(states, last)``: ``(T, B, C, H, W)`` (None for output="last") and ``(B, C, H, W)``.

    Example:
        >>> kernel = cwy_matrix(torch.randn(4, 4)).view(4, 4, 1, 1)
        >>> h0 = torch.randn(2, 4, 8, 8)
        >>> x = torch.zeros(50, 2, 4, 8, 8)
        >>> _, last = conv_rollout(x, h0, kernel, nonlinearity="identity")
        >>> torch.allclose(last.norm(), h0.norm(), rtol=1e-4)
        True
    """
    check_choices("conv_rollout", nonlinearity, output, memory)
    if memory == "reversible":
        raise ValueError(
            "conv_rollout: memory='reversible' is not for convolutions, whose adjoint is not "
            "their inverse. Use memory='checkpoint'."
        )
    _check(x, h0, kernel, bias, weight)
    wanted = torch.promote_types(torch.promote_types(x.dtype, h0.dtype), kernel.dtype)
    dtype = computed_in(wanted)
    x = x.to(dtype)
    h0 = h0.to(dtype)
    kernel = kernel.to(dtype)
    if weight is not None:
        weight = weight.to(dtype)
    if bias is not None:
        bias = bias.to(dtype).view(-1, 1, 1)
    only_last = output == "last"
    if exports_as_scan(backend):
        transition = Convolved(kernel)
        states, last = scan.rollout(x, h0, transition, bias, weight, nonlinearity, last=only_last)
    else:
        sizes, steps = equal_steps(x)
        spec = RolloutSpec(nonlinearity, sizes, steps, memory, only_last)
        states, last = _serve(x, h0, kernel, bias, weight, spec, backend)
    if only_last or states is None:
        return None, last.to(wanted)
    return states.to(wanted), last.to(wanted)


def _serve(
    x: Tensor,
    h0: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    spec: RolloutSpec,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence by the backend that serves it, with all images in one layout."""
    rows = flat(x)
    transformed = dispatch.why_only_autograd(rows, h0, kernel, bias, weight)
    layout = torch.contiguous_format
    # A transform knows no layouts.
    if not transformed and (channels_last(rows) or (weight is not None and channels_last(weight))):
        layout = torch.channels_last
    rows = rows.contiguous(memory_format=layout)
    h0 = h0.contiguous(memory_format=layout)
    kernel = kernel.contiguous(memory_format=layout)
    if weight is not None:
        weight = weight.contiguous(memory_format=layout)
    request = Request(
        n=kernel.shape[0],
        batch=h0.shape[0],
        steps=x.shape[0],
        dtype=rows.dtype,
        device=rows.device.type,
        nonlinearity=name_of(spec.nonlinearity),
        memory=spec.memory,
        transformed=transformed,
        compiling=torch.compiler.is_compiling(),
    )
    serve = dispatch.choose("conv_rollout", backend, request).rollout
    states, last = serve(rows, h0, Convolved(kernel), bias, weight, spec)
    if spec.last:
        return states, last
    return states.unflatten(0, x.shape[:2]), last


def _check(
    x: Tensor, h0: Tensor, kernel: Tensor, bias: Tensor | None, weight: Tensor | None
) -> None:
    """Raise unless all shapes fit."""
    _check_images("x", x, "(T, B, C, H, W)")
    _check_images("h0", h0, "(B, C, H, W)")
    _check_images("kernel", kernel, "(C, C, q, q)")
    channels = h0.shape[1]
    if kernel.shape[:2] != (channels, channels) or not all(size % 2 for size in kernel.shape[2:]):
        raise ValueError(
            f"conv_rollout: kernel must be ({channels}, {channels}, q, q) with q odd, for states "
            f"of {channels} channels that keep their size, got {tuple(kernel.shape)}."
        )
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"conv_rollout: bias must be ({channels},), got {tuple(bias.shape)}.")
    inputs = channels
    if weight is not None:
        inputs = weight.shape[1]
    images = (h0.shape[0], inputs, *h0.shape[2:])
    if x.shape[1:] != images:
        expected = ", ".join(map(str, images))
        raise ValueError(
            f"conv_rollout: x is {tuple(x.shape)} and h0 {tuple(h0.shape)}: "
            f"expected x (T, {expected})."
        )


def _check_images(name: str, value: Tensor, shape: str) -> None:
    """Raise unless a value is a real tensor with as many dimensions as a shape."""
    if not isinstance(value, Tensor):
        got = type(value).__name__
        raise ValueError(f"conv_rollout: {name} must be {shape}, got {got}.")
    if value.dim() != shape.count(",") + 1:
        got = f"shape {tuple(value.shape)}"
        raise ValueError(f"conv_rollout: {name} must be {shape}, got {got}.")
    if not value.is_floating_point():
        raise TypeError(f"conv_rollout: {name} must be real and floating-point, got {value.dtype}.")


@dataclass(frozen=True)
class Convolved(Transition):
    """Convolve images that are zero beyond their borders with a kernel ``(C, C, q, q)``, q odd."""

    kernel: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        return [self.kernel]

    @property
    def setting(self) -> str | None:
        return of_convolutions()

    def multiply(self, h: Tensor) -> Tensor:
        return self.map_inputs(h, self.kernel)

    def multiply_adjoint(self, delta: Tensor) -> Tensor:
        return conv_transpose2d(delta, self.kernel, padding=padding(self.kernel))

    def step(self, x: Tensor, h: Tensor, out: Tensor) -> None:
        torch.add(x, conv2d(h, self.kernel, padding=padding(self.kernel)), out=out)

    def back(self, g: Tensor, delta: Tensor, out: Tensor) -> None:
        torch.add(g, conv_transpose2d(delta, self.kernel, padding=padding(self.kernel)), out=out)

    def fastest_step(self, h: Tensor) -> Step:
        if h.is_cuda and len(self.kernel) >= MANY_CHANNELS and not on_tensor_cores(h):
            return self.turned().back
        return self.step

    def fastest_back(self, h: Tensor) -> Step:
        if h.is_cuda and on_tensor_cores(h):
            return self.turned().step
        return self.back

    def grad(self, deltas: Tensor, before: Tensor) -> tuple[Tensor | None, ...]:
        return (kernel_gradient(self.kernel, deltas, before),)

    def turned(self) -> Convolved:
        """Return its adjoint: ``turned().step`` is ``back``, and ``turned().back`` is ``step``."""
        layout = torch.contiguous_format
        if channels_last(self.kernel):
            layout = torch.channels_last
        turned = self.kernel.transpose(0, 1).flip(-2, -1)
        return Convolved(turned.contiguous(memory_format=layout))

    def map_inputs(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the convolution of each input with a weight ``(C, K, q, q)``."""
        return by_rows(lambda part: conv2d(part, weight, padding=padding(weight)), x, weight)

    def map_inputs_back(self, deltas: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        convolve = lambda part: conv_transpose2d(part, weight, padding=padding(weight))
        return by_rows(convolve, deltas, weight), kernel_gradient(weight, deltas, x)


def transition_of(tensors: list[Tensor]) -> Transition:
    """Return the transition that has these tensors. A kernel of images has four dimensions."""
    if len(tensors) > 1:
        return LowRank(*tensors)
    if tensors[0].dim() == 4:
        return Convolved(*tensors)
    return Formed(*tensors)


def padding(kernel: Tensor) -> list[int]:
    """Return the padding with which images keep their size."""
    return [size // 2 for size in kernel.shape[-2:]]


def by_rows(convolve: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """Convolve images ``(R, C, H, W)`` with a weight, as many at once as serve."""
    if _all_at_once(x, weight) or x.shape[0] <= IMAGES_AT_ONCE:
        return convolve(x)
    return torch.cat([convolve(part) for part in x.split(IMAGES_AT_ONCE)])


def _all_at_once(x: Tensor, weight: Tensor) -> bool:
    """Return whether one convolution takes all images."""
    # To cut them up, a compiler would have to know how many there are.
    if not x.is_cuda or torch.compiler.is_compiling():
        return True
    return on_tensor_cores(x) or on_tensor_cores(weight)


def kernel_gradient(kernel: Tensor, deltas: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of a kernel from that of its convolution with x, differentiable."""
    rows = IMAGES_AT_ONCE
    if _all_at_once(x, kernel):
        rows = max(x.shape[0], 1)
    parts = []
    for delta, part in zip(deltas.split(rows), x.split(rows), strict=True):
        _, found, _ = torch.ops.aten.convolution_backward(
            delta,
            part,
            kernel,
            bias_sizes=None,
            stride=[1, 1],
            padding=padding(kernel),
            dilation=[1, 1],
            transposed=False,
            output_padding=[0, 0],
            groups=1,
            output_mask=[False, True, False],
        )
        parts.append(found)
    if len(parts) == 1:
        return parts[0]
    return torch.stack(parts).sum(0)


def on_tensor_cores(x: Tensor) -> bool:
    """Return whether cuDNN may convolve images on tensor cores as they lie in memory.

    Then it takes no memory in addition.
    """
    if torch.compiler.is_compiling() or x.dtype == torch.float64 or not channels_last(x):
        return False
    return x.dtype != torch.float32 or of_convolutions() == "tf32"


def channels_last(x: Tensor) -> bool:
    """Return whether images are in ``torch.channels_last``.

    A transform can be asked for strides, not for layouts.
    """
    # To ask for the strides of an exported program's images would fix their number.
    if x.dim() != 4 or torch.compiler.is_exporting() or x.is_contiguous():
        return False
    _, c, _, w = x.shape
    return x.stride()[1:] == (1, w * c, c)


def flat(x: Tensor) -> Tensor:
    """Return images ``(T, B, C, H, W)`` as rows ``(TB, C, H, W)`` in the same layout."""
    if torch.compiler.is_exporting():
        return x.flatten(0, 1)
    if x.stride(2) == 1 and x.shape[2] > 1 and not x.is_contiguous():
        return x.movedim(2, -1).flatten(0, 1).movedim(-1, 1)
    return x.flatten(0, 1)


def rows_like(h: Tensor, count: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory for so many rows, in the layout of h, and in its dtype or another."""
    layout = torch.contiguous_format
    if channels_last(h):
        layout = torch.channels_last
    if dtype is None:
        dtype = h.dtype
    return torch.empty((count, *h.shape[1:]), dtype=dtype, device=h.device, memory_format=layout)


def gradient_like(x: Tensor) -> Tensor:
    """Return memory laid out as the gradient of a matrix, a vector or a kernel is."""
    if x.dim() == 4:
        return torch.empty_like(x)
    # Products are laid out row by row.
    return x.new_empty(x.shape)
