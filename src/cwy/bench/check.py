"""The gate: no time for an implementation that is wrong.

The result is compared with float64, and so is the gradient. The float64 gradient is itself held against difference
quotients, because an implementation with a wrong backward pass is as wrong in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..testing import double
from .entry import Case

# Relative to the norm; a few digits above what rounding leaves of well-conditioned inputs at N of some thousands.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# Difference quotients in float64 are good to about the root of its eps.
QUOTIENT_TOLERANCE = 1e-4
STEP = 1e-7


@dataclass(frozen=True)
class Accuracy:
    """Errors against float64, relative to its norm, and the orthogonality error; None where there is nothing to measure."""

    error: float
    gradient_error: float | None
    orthogonality: float | None


class CheckFailed(Exception):
    """An implementation is not what it claims; the message says how."""


def differentiate(
    call: Callable[..., Tensor], inputs: Sequence[Tensor], cotangent: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The result, and the gradients of the inputs for this gradient of the result."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = call(*inputs)
    return out, torch.autograd.grad(out, inputs, cotangent)


def accuracy(case: Case, out: Tensor, cotangent: Tensor, gradients: Sequence[Tensor] | None) -> Accuracy:
    """Errors of a result and its gradients against float64; nothing is judged yet.

    Args:
        case: what was computed.
        out: its result.
        cotangent: the gradient of the result that ``gradients`` belong to.
        gradients: of the inputs, or None if there is no backward pass.
    """
    inputs, z = [double(x) for x in case.inputs], double(cotangent)
    if gradients is None:
        with torch.no_grad():
            truth = case.truth(*inputs)
        gradient_error = None
    else:
        truth, true_gradients = differentiate(case.truth, inputs, z)
        _hold_against_quotients(case.truth, inputs, z, true_gradients)
        gradient_error = _worst(gradients, true_gradients)
    if out.shape != truth.shape:
        raise CheckFailed(f"its result has shape {tuple(out.shape)}, float64 has {tuple(truth.shape)}")
    orthogonality = None if case.orthogonality is None else case.orthogonality(out)
    return Accuracy(_worst([out], [truth.detach()]), gradient_error, orthogonality)


def judge(found: Accuracy, dtype: torch.dtype) -> None:
    """Raises :class:`CheckFailed` unless every error is within what the dtype allows."""
    allowed = _allowed(dtype)
    for what, error in (
        ("result", found.error),
        ("gradient", found.gradient_error),
        ("orthogonality", found.orthogonality),
    ):
        # Written so that a NaN fails.
        if error is not None and not error <= allowed:
            raise CheckFailed(f"{what} is off by {error:.1g} from float64, {allowed:g} is allowed")


def alike(found: Tensor | Sequence[Tensor], expected: Tensor | Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether results are the same to within what the dtype allows."""
    pair = [[x] if isinstance(x, Tensor) else x for x in (found, expected)]
    return _worst(pair[0], [double(x) for x in pair[1]]) <= _allowed(dtype)


def _allowed(dtype: torch.dtype) -> float:
    return TOLERANCE[dtype.to_real() if dtype.is_complex else dtype]


def _worst(found: Sequence[Tensor], true: Sequence[Tensor]) -> float:
    """The largest relative error, in norm; a tensor that is almost zero beside the others is measured by theirs."""
    norms = [t.norm().item() for t in true]
    scale = max(norms)
    return max(
        (double(f) - t).norm().item() / ((n if n > 1e-6 * scale else scale) or 1.0)
        for f, t, n in zip(found, true, norms, strict=True)
    )


def _hold_against_quotients(
    call: Callable[..., Tensor], inputs: Sequence[Tensor], z: Tensor, gradients: Sequence[Tensor]
) -> None:
    """Compares each gradient, along a random direction, with the central difference quotient of Re⟨z, call⟩."""
    largest = max(g.norm().item() * x.norm().item() / x.numel() ** 0.5 for g, x in zip(gradients, inputs, strict=True))
    for i, (x, g) in enumerate(zip(inputs, gradients, strict=True)):
        d = torch.randn_like(x) * (x.norm() / x.numel() ** 0.5 or 1.0)
        ahead, behind = ([*inputs[:i], x + sign * STEP * d, *inputs[i + 1 :]] for sign in (1, -1))
        with torch.no_grad():
            # Subtracted before they are summed: the sums are large, their difference is small.
            quotient = _inner(z, call(*ahead) - call(*behind)) / (2 * STEP)
        # A random direction sees an error e of the gradient as about ‖e‖ ‖d‖ / √size.
        scale = max(g.norm().item() * d.norm().item() / g.numel() ** 0.5, 1e-3 * largest)
        off = abs(_inner(g, d) - quotient) / (scale or 1.0)
        if not off <= QUOTIENT_TOLERANCE:
            raise CheckFailed(f"gradient of input {i + 1} is off by {off:.1g} from difference quotients in float64")


def _inner(a: Tensor, b: Tensor) -> float:
    return (a.conj() * b).sum().real.item()
