"""Checks of the points at which a step on the manifold starts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import orthogonality_error
from ..ops._linalg import double, nearest_orthogonal
from .batch import ROUNDED, Batch, as_matrix, as_weight

_IF_FREE = (
    "If it is free, put it in a group with 'stiefel': False, "
    "or let cwy.optim.for_model make the groups"
)


class DelayedCheck:
    """Find points on a CUDA device that are off the manifold, without waiting for the device.

    The host learns of them a step or more later.
    """

    def __init__(self) -> None:
        self._error: Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def request(self, given: list[Batch]) -> None:
        """Request the largest error of these batches, unless an answer is still awaited."""
        watched = [batch for batch in given if _is_watched(batch)]
        if not watched or self._error is not None:
            return
        device = watched[0].params[0].device
        errors = [batch.error().max().to(device, torch.float64) for batch in watched]
        largest = torch.stack(errors).max()
        with torch.cuda.device(device):
            self._error = largest.to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def found(self) -> bool:
        """Return whether an answer has come, and a point was off the manifold."""
        if self._error is None or self._copied is None or torch.compiler.is_compiling():
            return False
        if torch.cuda.is_current_stream_capturing() or not self._copied.query():
            return False
        error = self._error.item()
        self._error = None
        return not error <= ROUNDED


def _is_watched(batch: Batch) -> bool:
    p = batch.params[0]
    return batch.on_manifold and p.is_cuda and not is_hidden(p)


def is_hidden(p: Tensor) -> bool:
    """Return whether no value can be read: during the capture of a CUDA graph, or on meta."""
    if p.is_cuda and torch.cuda.is_current_stream_capturing():
        return True
    return p.is_meta


def check_point(what: str, p: Tensor, *, kernel: bool, project: bool) -> None:
    """Raise unless the parameter is on the manifold or may be moved there."""
    _check_kind(what, p)
    if p.is_meta:
        return
    matrix = as_matrix(p.detach(), kernel)
    error = orthogonality_error(matrix)
    if not error < float("inf"):
        raise ValueError(f"{what} has NaN or infinite entries.")
    if error > ROUNDED and not project:
        raise ValueError(
            f"{what} is not on the manifold: max|XᴴX - I| is {error:.2g}. "
            f"To move it there pass project=True. {_IF_FREE}."
        )
    # A smaller error is left as it is, so that a loaded point continues bit by bit.
    if error > torch.finfo(p.dtype).eps ** 0.5:
        p.detach().copy_(as_weight(nearest_orthogonal(double(matrix)), p, kernel))


def _check_kind(what: str, p: Tensor) -> None:
    if p.dim() < 2 or p.numel() == 0:
        shape = tuple(p.shape)
        raise ValueError(
            f"{what} must be a matrix (*, rows, columns), got shape {shape}. {_IF_FREE}."
        )
    if hasattr(p, "device_mesh"):
        raise ValueError(
            f"{what} is sharded, but a step on the manifold needs the whole matrix. Use DDP for it."
        )


def describe(group: dict[str, Any], index: int) -> str:
    """Return the words that name a parameter in an error."""
    names = group.get("param_names")
    p = group["params"][index]
    shape: object = "nested"
    if not p.is_nested:
        shape = tuple(p.shape)
    if names:
        return f"parameter {names[index]!r} {shape}"
    return f"parameter {index} of its group, {shape}"
