"""The gate: an implementation that is wrong gets no time.

The result is compared with float64, and so is the gradient. The float64 gradient is itself compared
with difference quotients, because an implementation with a wrong backward pass is as wrong in
float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops._linalg import double
from .entry import Case

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Relative to the norm: a few digits above rounding at N of some thousands."""
QUOTIENT_TOLERANCE = 1e-4
"""Difference quotients in float64 are good to about the root of its eps."""
STEP = 1e-7
"""The step of the difference quotients, relative to the input."""


@dataclass(frozen=True)
class Accuracy:
    """Hold errors against float64, relative to its norm, and the orthogonality error.

    None where there is nothing to measure.
    """

    error: float
    gradient_error: float | None
    orthogonality: float | None


class CheckFailed(Exception):
    """Report that an implementation is not what it claims. The message has the reason."""


def differentiate(
    call: Callable[..., Tensor], inputs: Sequence[Tensor], cotangent: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the result, and the gradients of the inputs for this gradient of the result."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = call(*inputs)
    return out, torch.autograd.grad(out, inputs, cotangent)


def accuracy(
    case: Case, out: Tensor, cotangent: Tensor, gradients: Sequence[Tensor] | None
) -> Accuracy:
    """Measure errors of a result and its gradients against float64, without judging them.

    Args:
        case: what was computed.
        out: its result.
        cotangent: the gradient of the result that ``gradients`` belong to.
        gradients: of the inputs, or None if there is no backward pass.
    """
    inputs = [double(x) for x in case.inputs]
    z = double(cotangent)
    gradient_error = None
    if gradients is None:
        with torch.no_grad():
            truth = case.truth(*inputs)
    else:
        truth, true_gradients = differentiate(case.truth, inputs, z)
        _hold_against_quotients(case.truth, inputs, z, true_gradients)
        gradient_error = _worst(gradients, true_gradients)
    if out.shape != truth.shape:
        raise CheckFailed(
            f"its result has shape {tuple(out.shape)}, float64 has {tuple(truth.shape)}"
        )
    orthogonality = None
    if case.orthogonality is not None:
        orthogonality = case.orthogonality(out)
    return Accuracy(_worst([out], [truth.detach()]), gradient_error, orthogonality)


def judge(found: Accuracy, dtype: torch.dtype) -> None:
    """Raise :class:`CheckFailed` unless every error is within what the dtype allows."""
    allowed = _allowed(dtype)
    errors = {
        "result": found.error,
        "gradient": found.gradient_error,
        "orthogonality": found.orthogonality,
    }
    for what, error in errors.items():
        # Written so that a NaN fails.
        if error is not None and not error <= allowed:
            raise CheckFailed(f"{what} is off by {error:.1g} from float64, {allowed:g} is allowed")


def alike(
    found: Tensor | Sequence[Tensor], expected: Tensor | Sequence[Tensor], dtype: torch.dtype
) -> bool:
    """Return whether results are the same to within what the dtype allows."""
    truth = [double(x) for x in _listed(expected)]
    return _worst(_listed(found), truth) <= _allowed(dtype)


def _listed(tensors: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    return tensors


def _allowed(dtype: torch.dtype) -> float:
    if dtype.is_complex:
        dtype = dtype.to_real()
    return TOLERANCE[dtype]


def _worst(found: Sequence[Tensor], true: Sequence[Tensor]) -> float:
    """Return the largest relative error, in norm.

    A tensor that is almost zero next to the others is measured by their norm.
    """
    largest = max(t.norm().item() for t in true)
    errors = []
    for f, t in zip(found, true, strict=True):
        scale = t.norm().item()
        if scale <= 1e-6 * largest:
            scale = largest
        errors.append((double(f) - t).norm().item() / (scale or 1.0))
    return max(errors)


def _hold_against_quotients(
    call: Callable[..., Tensor], inputs: Sequence[Tensor], z: Tensor, gradients: Sequence[Tensor]
) -> None:
    """Compare each gradient with the central difference quotient of Re⟨z, call⟩.

    Both are taken along a random direction.
    """
    largest = max(
        g.norm().item() * x.norm().item() / x.numel() ** 0.5
        for g, x in zip(gradients, inputs, strict=True)
    )
    for i, (x, g) in enumerate(zip(inputs, gradients, strict=True)):
        d = torch.randn_like(x) * (x.norm() / x.numel() ** 0.5 or 1.0)
        ahead = [*inputs[:i], x + STEP * d, *inputs[i + 1 :]]
        behind = [*inputs[:i], x - STEP * d, *inputs[i + 1 :]]
        with torch.no_grad():
            # Subtracted before they are summed: the sums are large, their difference is small.
            quotient = _inner(z, call(*ahead) - call(*behind)) / (2 * STEP)
        # A random direction sees an error e of the gradient as about ‖e‖ ‖d‖ / √size.
        scale = max(g.norm().item() * d.norm().item() / g.numel() ** 0.5, 1e-3 * largest)
        off = abs(_inner(g, d) - quotient) / (scale or 1.0)
        if not off <= QUOTIENT_TOLERANCE:
            raise CheckFailed(
                f"gradient of input {i + 1} is off by {off:.1g} from difference quotients in "
                "float64"
            )


def _inner(a: Tensor, b: Tensor) -> float:
    return (a.conj() * b).sum().real.item()
