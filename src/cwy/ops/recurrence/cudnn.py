"""relu and tanh on a GPU through torch's fused RNN, with the input map set to the identity.

Its tanh is an approximation, as in ``torch.nn.RNN``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function

from .._precision import CUDNN_RNN, full_precision
from . import reference
from .spec import Request, RolloutSpec
from .transition import Formed, Transition

_DTYPES = (torch.float32, torch.float64, torch.float16)
_RUN = {"relu": torch.rnn_relu, "tanh": torch.rnn_tanh}
_HELD_UNITS = 384
"""Above, it reloads the weights at each step, and the loop as a CUDA graph is faster."""


def why_not(request: Request) -> str | None:
    """Return why torch's fused RNN can't serve, or None if it can."""
    if request.compiling:
        # The questions below are not for a compiler.
        return "a compiler or exporter is tracing"
    reasons = []
    if request.device != "cuda":
        reasons.append(f"x is on {request.device}")
    elif not torch.backends.cudnn.is_available():
        reasons.append("this torch has no cuDNN")
    if request.nonlinearity not in ("relu", "tanh"):
        reasons.append(f"it has relu and tanh, not {request.nonlinearity}")
    if request.dtype not in _DTYPES:
        reasons.append(f"it has no kernel for {request.dtype}")
    if request.reflections is not None:
        reasons.append("it takes a formed transition, not factors")
    if request.memory != "store":
        reasons.append(f"it stores every state, and memory is {request.memory!r}")
    if not request.equal_lengths:
        reasons.append("sequences end at different steps")
    if request.steps == 0:
        reasons.append("there is no step")
    if request.transformed is not None:
        reasons.append(request.transformed)
    return "; ".join(reasons) or None


def why_pass(request: Request) -> str | None:
    """Return why another backend is better, though this one can serve."""
    if request.n <= _HELD_UNITS:
        return None
    return f"N = {request.n} is above the {_HELD_UNITS} that it holds on chip"


class _Fused(Function):
    """Run torch's fused RNN, forward and backward in full precision.

    torch's own graph would run the backward pass with the caller's settings.
    """

    @staticmethod
    def forward(ctx, x, h0, q, bias, nonlinearity):
        batch, n = h0.shape
        wanted = zip((x, h0, q, bias), ctx.needs_input_grad, strict=False)
        given = [tensor.detach().requires_grad_(need) for tensor, need in wanted]
        with torch.enable_grad(), full_precision("cuda"), CUDNN_RNN:
            xs, hs, qs, bs = given
            weights = _in_one_piece(qs, bs)
            steps = xs.reshape(-1, batch, n)
            run = _RUN[nonlinearity]
            states, hn = run(steps, hs[None], weights, True, 1, 0.0, True, False, False)
        ctx.given = given
        ctx.outputs = (states, hn)
        ctx.nonlinearity = nonlinearity
        ctx.save_for_backward(x, h0, q, bias)
        return states.detach().reshape(-1, n), hn.detach()[0]

    @staticmethod
    def backward(ctx, grad_states, grad_last):
        if torch.is_grad_enabled():
            found = _second_derivative(ctx, grad_states, grad_last)
        else:
            states, hn = ctx.outputs
            wanted = [tensor for tensor in ctx.given if tensor.requires_grad]
            given = (grad_states.reshape(states.shape), grad_last[None])
            with full_precision("cuda"), CUDNN_RNN:
                found = torch.autograd.grad((states, hn), wanted, given, retain_graph=True)
        left = iter(found)
        gradients: list[Tensor | None] = []
        for tensor in ctx.given:
            if tensor.requires_grad:
                gradients.append(next(left))
            else:
                gradients.append(None)
        return *gradients, None


def _in_one_piece(q: Tensor, bias: Tensor) -> list[Tensor]:
    """Return the four weights of an RNN in one piece of memory, as cuDNN wants them."""
    eye = torch.eye(q.shape[0], dtype=q.dtype, device=q.device)
    parts = (eye, q, bias, torch.zeros_like(bias))
    flat = torch.cat([part.reshape(-1) for part in parts])
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _second_derivative(ctx, grad_states: Tensor, grad_last: Tensor) -> tuple[Tensor, ...]:
    """Return differentiable gradients by the definition. cuDNN has none."""
    states, _ = ctx.outputs
    x, h0, q, bias = ctx.saved_tensors
    needed = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
    wanted = [tensor for tensor, need in needed if need]
    spec = RolloutSpec(ctx.nonlinearity, [h0.shape[0]] * states.shape[0])
    made = reference.rollout(x, h0, Formed(q), bias, None, spec)
    return torch.autograd.grad(made, wanted, (grad_states, grad_last), create_graph=True)


def rollout(
    x: Tensor,
    h0: Tensor,
    transition: Transition,
    bias: Tensor | None,
    weight: Tensor | None,
    spec: RolloutSpec,
) -> tuple[Tensor, Tensor]:
    """Return the states of every step and the last ones, as :func:`.reference.rollout`."""
    assert isinstance(transition, Formed)
    if weight is not None:
        x = torch.nn.functional.linear(x.to(weight.dtype), weight)
    if bias is None:
        bias = torch.zeros_like(h0[0])
    x = x.to(h0.dtype).contiguous()
    states, last = _Fused.apply(x, h0.contiguous(), transition.q, bias, spec.nonlinearity)
    return states.to(spec.rounded or h0.dtype), last
