"""Measures and assertions, for the library's tests and for its users'."""

import torch
from torch import Tensor


def double(x: Tensor) -> Tensor:
    """``x`` in float64 or complex128, without its graph, on a device that has them."""
    x = x.detach()
    return (x.cpu() if x.device.type == "mps" else x).to(torch.complex128 if x.is_complex() else torch.float64)


def orthogonality_error(x: Tensor) -> float:
    r"""How far a matrix is from orthonormal columns (rows, if it is wide): $\max|X^H X - I|$.

    Args:
        x: ``(*, N, M)``; of a batch, the worst. A convolution kernel is seen as a matrix with ``x.flatten(1)``.

    Returns:
        The largest entry of the difference, computed in float64.

    Example:
        >>> orthogonality_error(torch.eye(5)[:, :3])
        0.0
    """
    if not isinstance(x, Tensor) or x.dim() < 2:
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"orthogonality_error: x must be a matrix (*, N, M), got {got}.")
    x = double(x)
    if x.numel() == 0:
        return 0.0
    x = x if x.shape[-2] >= x.shape[-1] else x.mH
    gram = x.mH @ x
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    return gram.abs().max().item()


def assert_as_close(actual: Tensor, plain: Tensor, truth: Tensor, factor: float = 2.0) -> None:
    """Asserts that ``actual`` is at most ``factor`` times as far from the float64 ``truth`` as ``plain`` is.

    Args:
        actual: the result under test.
        plain: the same computed by plain torch in the same dtype: its rounding is the tolerance.
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
        raise AssertionError(f"off by {error:.3g} from float64; plain torch, times {factor:g}, allows {allowed:.3g}.")
