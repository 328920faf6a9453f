"""Measures and assertions, for the tests of this library and of its users."""

import torch
from torch import Tensor

from .api import orthogonality_error
from .ops._linalg import double, gram_gap, matrix_error

__all__ = ["assert_as_close", "double", "gram_gap", "matrix_error", "orthogonality_error"]


def assert_as_close(actual: Tensor, plain: Tensor, truth: Tensor, factor: float = 2.0) -> None:
    """Assert that a result is at most ``factor`` times as far from the truth as plain torch is.

    Args:
        actual: the result under test.
        plain: the same computed by plain torch in the same dtype. Its rounding is the tolerance.
        truth: the same computed in float64.
        factor: how much worse than ``plain`` is allowed.

    Example:
        >>> x = torch.rand(99)
        >>> assert_as_close(x.flip(0).sum(), plain=x.sum(), truth=x.double().sum(), factor=10)
    """
    truth = double(truth)
    floor = torch.finfo(actual.dtype).eps * truth.abs().max().item()
    allowed = factor * max((double(plain) - truth).abs().max().item(), floor)
    error = (double(actual) - truth).abs().max().item()
    # Written so that a NaN fails.
    if not error <= allowed:
        raise AssertionError(
            f"off by {error:.3g} from float64. Plain torch, times {factor:g}, allows {allowed:.3g}."
        )
