"""Measures and assertions, for the library's tests and for its users'."""

from collections.abc import Callable, Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


def double(x: Tensor) -> Tensor:
    """``x`` in float64 or complex128, without its graph, on a device that has them."""
    x = x.detach()
    return (x.cpu() if x.device.type == "mps" else x).to(
        torch.complex128 if x.is_complex() else torch.float64
    )


def orthogonality_error(x: Tensor | nn.Module) -> float:
    r"""Return how far a matrix is from orthonormal columns (rows, if it is wide): $\max|X^H X - I|$.

    Args:
        x: ``(*, N, M)``. A batch counts by its worst matrix. The kernel of a convolution is flattened from
            dimension 1, as in :func:`cwy.orthogonal`. A tensor of three or more dimensions may be a batch or a
            kernel: the smaller of both errors is returned. A module counts by the worst of the weights that
            :func:`cwy.orthogonal` constrains within it.

    Returns:
        The largest entry of the difference, computed in float64.

    Example:
        >>> orthogonality_error(torch.eye(5)[:, :3])
        0.0
        >>> model = torch.nn.Sequential(orthogonal(torch.nn.Conv2d(4, 8, 3)), torch.nn.ReLU())
        >>> orthogonality_error(model) < 1e-5, orthogonality_error(model[0].weight) < 1e-5
        (True, True)
    """
    if isinstance(x, nn.Module):
        errors = [matrix_error(weight) for weight in _constrained(x)]
        if not errors:
            raise ValueError(
                f"orthogonality_error: {type(x).__name__} has no weight that cwy.orthogonal constrains. "
                "Constrain one first, or pass a weight."
            )
        return max(errors)
    if not isinstance(x, Tensor) or x.dim() < 2:
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"orthogonality_error: x must be a module or a matrix (*, N, M), got {got}."
        )
    error = matrix_error(x)
    if x.dim() > 2 and _may_be_kernel(x, error):
        return min(error, matrix_error(x.flatten(1)))
    return error


def matrix_error(x: Tensor) -> float:
    r"""Return $\max|X^H X - I|$ of matrices ``x (*, N, M)``, or of their adjoints where they are wide, in float64.

    Args:
        x: the matrix, or a batch of them. The last two dimensions are the matrix.

    Returns:
        The largest entry of the difference, over the whole batch.

    Example:
        >>> matrix_error(torch.eye(4).repeat(2, 1, 1))
        0.0
    """
    if x.numel() == 0:
        return 0.0
    return gram_gap(x).abs().max().item()


def gram_gap(x: Tensor) -> Tensor:
    r"""Return $X^H X - I$ of matrices ``x (*, N, M)``, or of their adjoints where they are wide, in float64.

    Args:
        x: the matrix, or a batch of them.

    Returns:
        ``(*, M, M)``, zero where the matrix has orthonormal columns.

    Example:
        >>> gram_gap(2 * torch.eye(2))
        tensor([[3., 0.],
                [0., 3.]], dtype=torch.float64)
    """
    x = double(x)
    x = x if x.shape[-2] >= x.shape[-1] else x.mH
    gap = x.mH @ x
    gap.diagonal(dim1=-2, dim2=-1).sub_(1)
    return gap


def _may_be_kernel(x: Tensor, error: float) -> bool:
    """Return whether the flattened tensor can have a smaller error: its unit rows or columns decide at low cost."""
    flat = double(x.flatten(1))
    if flat.numel() == 0:
        return False
    shorter = -1 if flat.shape[0] <= flat.shape[1] else 0
    off = (flat.abs().square().sum(shorter) - 1).abs().max().item()
    return off < error


def _constrained(module: nn.Module) -> Iterator[Tensor]:
    """Yield every weight that a map of this library constrains, as matrices ``(*, rows, columns)``."""
    for layer in module.modules():
        for name, maps in _maps(layer):
            for chart in maps:
                as_matrix: Callable[[Tensor], Tensor] | None = getattr(chart, "as_matrix", None)
                if as_matrix is not None:
                    yield as_matrix(getattr(layer, name).detach())
                    break


def _maps(layer: nn.Module) -> Iterator[tuple[str, Iterable[nn.Module]]]:
    """Yield the name of each weight of a layer that has maps, with these maps."""
    if parametrize.is_parametrized(layer):
        yield from cast(nn.ModuleDict, layer.parametrizations).items()  # pyrefly: ignore
    kept = layer._modules.get("on_manifold")
    if isinstance(kept, nn.ModuleDict):
        for name, chart in kept.items():
            yield name, [chart]


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
        raise AssertionError(
            f"off by {error:.3g} from float64; plain torch, times {factor:g}, allows {allowed:.3g}."
        )
