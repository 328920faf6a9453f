"""The public function ``conv_rollout``: a recurrence of images."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import dispatch
from . import autograd, reference, scan
from .functions import Request, by_autograd, by_hand, check_choices, equal_steps, exports_plainly
from .transition import channels_last, flat

dispatch.provide(
    "conv_rollout",
    dispatch.Backend(
        "torch", autograd, "the loop and its adjoint by hand; CUDA graphs on a GPU", by_hand
    ),
    dispatch.Backend(
        "reference",
        reference,
        "a loop and autograd: the definition; torch.func, callables",
        by_autograd,
    ),
)


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
    r"""A whole recurrence of images, $h_t = f(K * h_{t-1} + x_t + b)$, forward and backward.

    Images are zero beyond their borders and keep their size. As :func:`~cwy.ops.rollout`, it is computed in float32 even
    under autocast; whether convolutions may use TF32 is torch's own setting. Where the images of x, or the weight, lie in
    ``torch.channels_last``, so do the states: with TF32 the faster layout on a GPU.

    Args:
        x: ``(T, B, C, H, W)``, what is added at every step.
        h0: ``(B, C, H, W)``, the first states.
        kernel: ``(C, C, q, q)``, q odd.
        bias: ``(C,)`` or None. For "modrelu" it is the threshold.
        nonlinearity: "relu", "modrelu", "abs", "leaky_relu", "tanh", "identity"; or a function, which takes the slow path.
        weight: ``(C, K, q, q)``, if given, is convolved with x ``(T, B, K, H, W)`` first; with memory="checkpoint" a chunk of
            steps at a time.
        output: "all" states, or only the "last".
        memory: "store" every state for the backward; or "checkpoint" $\sqrt T$ of them and compute the rest again.
        backend: "auto", or one of those that ``cwy info`` lists.

    Returns:
        ``(states, last)``: ``(T, B, C, H, W)`` (None for output="last") and ``(B, C, H, W)``.

    Example:
        >>> kernel = cwy_matrix(torch.randn(4, 4)).view(4, 4, 1, 1)
        >>> h0 = torch.randn(2, 4, 8, 8)
        >>> _, last = conv_rollout(torch.zeros(50, 2, 4, 8, 8), h0, kernel, nonlinearity="identity")
        >>> torch.allclose(last.norm(), h0.norm(), rtol=1e-4)
        True
    """
    check_choices("conv_rollout", nonlinearity, output, memory)
    if memory == "reversible":
        raise ValueError(
            "conv_rollout: memory='reversible' is not for convolutions, whose adjoint is not their inverse. "
            "Use memory='checkpoint'."
        )
    _check(x, h0, kernel, bias, weight)
    wanted = torch.promote_types(torch.promote_types(x.dtype, h0.dtype), kernel.dtype)
    dtype = torch.float32 if wanted in (torch.float16, torch.bfloat16) else wanted
    weight = None if weight is None else weight.to(dtype)
    if exports_plainly(backend):
        threshold = None if bias is None else bias.to(dtype).view(-1, 1, 1)
        given = (
            x.to(dtype),
            h0.to(dtype),
            [kernel.to(dtype)],
            threshold,
            weight,
            nonlinearity,
            output == "last",
        )
        states, last = scan.rollout(*given)
        return None if states is None else states.to(wanted), last.to(wanted)
    rows = flat(x.to(dtype))
    transformed = dispatch.why_only_autograd(rows, h0, kernel, bias, weight)
    # A transform knows no layouts.
    if not transformed and (channels_last(rows) or (weight is not None and channels_last(weight))):
        layout = torch.channels_last
    else:
        layout = torch.contiguous_format
    rows, h0, kernel = (t.to(dtype).contiguous(memory_format=layout) for t in (rows, h0, kernel))
    weight = None if weight is None else weight.contiguous(memory_format=layout)
    sizes, steps = equal_steps(x)
    request = Request(
        kernel.shape[0], h0.shape[0], x.shape[0], dtype, rows.device.type,
        nonlinearity if isinstance(nonlinearity, str) else "callable", None, memory, output == "last", True,
        transformed, torch.compiler.is_compiling(),
    )  # fmt: skip
    serve = dispatch.choose("conv_rollout", backend, request).rollout
    beside = None if bias is None else bias.to(dtype).view(-1, 1, 1)
    states, last = serve(
        rows, h0, [kernel], beside, weight, nonlinearity, sizes, memory, output == "last", steps
    )
    return None if output == "last" else states.to(wanted).unflatten(0, x.shape[:2]), last.to(
        wanted
    )


def _check(
    x: Tensor, h0: Tensor, kernel: Tensor, bias: Tensor | None, weight: Tensor | None
) -> None:
    for name, value, shape in (
        ("x", x, "(T, B, C, H, W)"),
        ("h0", h0, "(B, C, H, W)"),
        ("kernel", kernel, "(C, C, q, q)"),
    ):
        if not isinstance(value, Tensor) or value.dim() != shape.count(",") + 1:
            got = (
                f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            )
            raise ValueError(f"conv_rollout: {name} must be {shape}, got {got}.")
        if not value.is_floating_point():
            raise TypeError(
                f"conv_rollout: {name} must be real and floating-point, got {value.dtype}."
            )
    channels = h0.shape[1]
    if kernel.shape[:2] != (channels, channels) or not all(size % 2 for size in kernel.shape[2:]):
        raise ValueError(
            f"conv_rollout: kernel must be ({channels}, {channels}, q, q) with q odd, for states of {channels} channels that "
            f"keep their size; got {tuple(kernel.shape)}."
        )
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"conv_rollout: bias must be ({channels},), got {tuple(bias.shape)}.")
    mapped = channels if weight is None else weight.shape[1]
    if x.shape[1:] != (h0.shape[0], mapped, *h0.shape[2:]):
        expected = ", ".join(map(str, (h0.shape[0], mapped, *h0.shape[2:])))
        raise ValueError(
            f"conv_rollout: x is {tuple(x.shape)} and h0 {tuple(h0.shape)}: expected x (T, {expected})."
        )
