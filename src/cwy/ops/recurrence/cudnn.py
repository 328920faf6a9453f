"""relu and tanh on a GPU through torch's fused RNN, with the input map set to the identity.

Its tanh is an approximation, as in ``torch.nn.RNN``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import Function

from .._precision import CUDNN_RNN, full_precision
from . import reference

if TYPE_CHECKING:
    from .functions import Request

_DTYPES = (torch.float32, torch.float64, torch.float16)


def why_not(request: Request) -> str | None:
    """Why torch's fused RNN can't serve, or None if it can."""
    reasons = []
    if request.device != "cuda":
        reasons.append(f"x is on {request.device}")
    elif not torch.backends.cudnn.is_available():
        reasons.append("this torch has no cuDNN")
    if request.nonlinearity not in ("relu", "tanh"):
        reasons.append(f"it has relu and tanh, not {request.nonlinearity}")
    if request.dtype not in _DTYPES:
        reasons.append(f"it has no kernel for {request.dtype}")
    if request.factors is not None:
        reasons.append("it takes a formed transition, not factors")
    if request.memory != "store":
        reasons.append(f"it stores every state, and memory is {request.memory!r}")
    if not request.equal_lengths:
        reasons.append("sequences end at different steps")
    if request.steps == 0:
        reasons.append("there is no step")
    if request.compiling:
        reasons.append("a compiler or exporter is tracing")
    if request.transformed is not None:
        reasons.append(request.transformed)
    return "; ".join(reasons) or None


def why_pass(request: Request) -> str | None:
    """Why another backend is better, though this one can serve."""
    # Above, it reloads the weights at each step, and the loop as a CUDA graph is faster.
    return None if request.n <= 384 else f"N = {request.n} is above the 384 that it holds on chip"


class _Fused(Function):
    """Runs forward and backward with reduced precision held off, which torch's own graph would not."""

    @staticmethod
    def forward(ctx, x, h0, q, bias, nonlinearity):
        batch, n = h0.shape
        given = [
            p.detach().requires_grad_(need)
            for p, need in zip((x, h0, q, bias), ctx.needs_input_grad, strict=False)
        ]
        with torch.enable_grad(), full_precision("cuda"), CUDNN_RNN:
            xs, hs, qs, bs = given
            # cuDNN wants its weights in one piece of memory.
            parts = torch.eye(n, dtype=x.dtype, device=x.device), qs, bs, torch.zeros_like(bs)
            flat = torch.cat([part.reshape(-1) for part in parts]).split(
                [part.numel() for part in parts]
            )
            weights = [piece.view(part.shape) for piece, part in zip(flat, parts, strict=True)]
            run = torch.rnn_relu if nonlinearity == "relu" else torch.rnn_tanh
            states, hn = run(
                xs.reshape(-1, batch, n), hs[None], weights, True, 1, 0.0, True, False, False
            )
        ctx.given, ctx.outputs, ctx.nonlinearity = given, (states, hn), nonlinearity
        ctx.save_for_backward(x, h0, q, bias)
        return states.detach().reshape(-1, n), hn.detach()[0]

    @staticmethod
    def backward(ctx, g, gn):
        states, hn = ctx.outputs
        wanted = [p for p in ctx.given if p.requires_grad]
        if torch.is_grad_enabled():
            # A second derivative: cuDNN has none, the definition has.
            wanted = [
                p for p, need in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False) if need
            ]
            x, h0, q, bias = ctx.saved_tensors
            sizes = [h0.shape[0]] * states.shape[0]
            made = reference.rollout(
                x, h0, [q], bias, None, ctx.nonlinearity, sizes, "store", False
            )
            found = iter(torch.autograd.grad(made, wanted, (g, gn), create_graph=True))
        else:
            with full_precision("cuda"), CUDNN_RNN:
                gradients = g.reshape(states.shape), gn[None]
                found = iter(
                    torch.autograd.grad((states, hn), wanted, gradients, retain_graph=True)
                )
        return *(next(found) if p.requires_grad else None for p in ctx.given), None


def rollout(
    x: Tensor, h0: Tensor, q: list[Tensor], bias: Tensor | None, weight: Tensor | None, nonlinearity: str, sizes: list[int],
    memory: str, last: bool, steps: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if weight is not None:
        x = torch.nn.functional.linear(x, weight)
    bias = torch.zeros_like(h0[0]) if bias is None else bias
    return _Fused.apply(x.contiguous(), h0.contiguous(), q[0], bias, nonlinearity)
