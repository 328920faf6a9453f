"""Parameters of one shape, updated together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..manifolds import stiefel

HALF = (torch.float16, torch.bfloat16)

# Points that were rounded to a narrower dtype, bfloat16 even, are off by less.
ROUNDED = 0.1


def working(dtype: torch.dtype) -> torch.dtype:
    """What a parameter of this dtype is updated in."""
    return torch.float32 if dtype in HALF else dtype


def real(dtype: torch.dtype) -> torch.dtype:
    """What its absolute values have; ``dtype.to_real()`` breaks the graph of a compiler amid an update."""
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)


def as_matrix(x: Tensor, kernel: bool) -> Tensor:
    """A weight as ``(*, N, M)`` with N >= M: a kernel flattened from dimension 1, a wide matrix transposed."""
    x = x.flatten(1) if kernel else x
    return x.mH if x.shape[-2] < x.shape[-1] else x


def as_weight(x: Tensor, like: Tensor, kernel: bool) -> Tensor:
    """A matrix ``(*, N, M)`` as the weight that :func:`as_matrix` made it of."""
    rows, columns = (like.flatten(1) if kernel else like).shape[-2:]
    return (x.mH if rows < columns else x).reshape(like.shape)


def batches(group: dict[str, Any], state: dict[Tensor, Any]) -> Iterator[Batch]:
    """The parameters of a group that have a gradient: on the manifold those of one shape together, free ones one by one."""
    alike = defaultdict(list)
    for i, p in enumerate(group["params"]):
        if p.grad is not None:
            alike[(p.shape, p.dtype, p.device) if group["stiefel"] else i].append(i)
    for indices in alike.values():
        yield Batch(indices, group, state)


def readable(p: Tensor) -> bool:
    """Return whether the host can read a value of this parameter without waiting for a device."""
    return p.device.type == "cpu" and not torch.compiler.is_compiling()


def _largest(g: Tensor) -> Tensor:
    """The largest absolute value in each matrix, ``(*, 1, 1)``; of complex ones, that of a real or imaginary part."""
    if g.is_complex():
        g = torch.view_as_real(g.resolve_conj()).flatten(-2)
    return torch.linalg.vector_norm(g, torch.inf, dim=(-2, -1), keepdim=True)


def read_largest(x: Tensor) -> float:
    """Read the largest of some numbers, or NaN if one is NaN."""
    return x.item() if x.numel() == 1 else x.max().item()


def _huge(dtype: torch.dtype) -> float:
    """The root of the largest number: products of larger ones overflow."""
    return torch.finfo(dtype).max ** 0.5


class Batch:
    """K parameters of one shape as one stack: ``(K, *, N, M)`` on the manifold. One parameter stays as it is, ``(*, N, M)``.

    State is kept parameter by parameter in the parameter's own shape; for a half-precision one in float32, its value too.

    Args:
        indices: the places of the parameters in their group.
        group: the group.
        state: the state of the optimizer.
    """

    def __init__(self, indices: list[int], group: dict[str, Any], state: dict[Tensor, Any]) -> None:
        self.indices = indices
        self.params: list[Tensor] = [group["params"][i] for i in indices]
        self.group = group
        self.state = state
        self.dtype = working(self.params[0].dtype)
        self._points: Tensor | None = None
        self._gradients: Tensor | None = None
        # The largest entry of the gradient, where the host has read it.
        self._largest_read = math.inf

    def points(self) -> Tensor:
        """Where the parameters are, in working precision."""
        if self._points is None:
            self._points = self._stack(
                [self._master(p) if p.dtype in HALF else p for p in self.params]
            )
        return self._points

    def is_finite(self) -> bool:
        """Return whether every gradient is finite. The host reads a value for it."""
        # A number that the host has read would become a constant of the compiled step.
        if not self.group["stiefel"] or torch.compiler.is_compiling():
            return bool(self._given().isfinite().all())
        self._largest_read = read_largest(_largest(self._given()))
        return math.isfinite(self._largest_read)

    def error(self) -> Tensor:
        """The largest entry of $X^H X - I$ of each matrix, ``(K, *, 1, 1)``."""
        error = stiefel.gram_error(self.points())
        return torch.linalg.vector_norm(error, torch.inf, dim=(-2, -1), keepdim=True)

    def gradients(self) -> Tensor:
        """Which way is up (``maximize``: down). One with an entry that is not finite counts as zero, a huge one as smaller."""
        g = self._given()
        if not self.group["stiefel"]:
            g = torch.where(g.isfinite().all(), g, 0)
        elif not self._largest_read <= _huge(self.dtype):
            largest = _largest(g)
            g = torch.where(largest.isfinite(), g, 0)
            # No sum of products overflows then.
            g = g * (_huge(self.dtype) / largest.nan_to_num(posinf=0.0)).clamp(max=1)
        return -g if self.group["maximize"] else g

    def move(self, points: Tensor) -> None:
        """Put the parameters there. Of those that the host can't check, only what was on the manifold moves."""
        if self.group["stiefel"] and not readable(self.params[0]):
            points = torch.where(self.error() <= ROUNDED, points, self.points())
        for p, x in zip(self.params, self._apart(points), strict=True):
            x = self._like(p, x)
            if p.dtype in HALF:
                self.state[p]["master"].copy_(x)
            p.copy_(x)

    def read(self, key: str) -> Tensor:
        """State of the parameters' shape, stacked like them; zero at first."""
        for p in self.params:
            if key not in self.state[p]:
                self.state[p][key] = torch.zeros_like(p, dtype=self.dtype)
        return self._stack([self.state[p][key] for p in self.params])

    def write(self, key: str, value: Tensor) -> None:
        """Keeps what :meth:`read` will give."""
        for p, x in zip(self.params, self._apart(value), strict=True):
            self.state[p][key].copy_(self._like(p, x))

    def read_numbers(self, key: str, like: Tensor) -> Tensor:
        """Real numbers per parameter, of the shape of ``like``; zero at first."""
        for p, x in zip(self.params, self._apart(like), strict=True):
            if key not in self.state[p]:
                self.state[p][key] = torch.zeros_like(x, dtype=real(self.dtype))
        return self._together([self.state[p][key] for p in self.params])

    def write_numbers(self, key: str, value: Tensor) -> None:
        """Keeps what :meth:`read_numbers` will give."""
        for p, x in zip(self.params, self._apart(value), strict=True):
            self.state[p][key].copy_(x)

    def count(self) -> Tensor:
        """How many steps each parameter has taken, this one included, broadcast to the stack."""
        for p in self.params:
            if "step" not in self.state[p]:
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            self.state[p]["step"] += 1
        steps = self._together([self.state[p]["step"] for p in self.params]).to(real(self.dtype))
        return steps.reshape((*steps.shape, *[1] * self._view(self.params[0]).dim()))

    def _given(self) -> Tensor:
        """The gradients as they were given, in working precision."""
        if self._gradients is None:
            self._gradients = self._stack([p.grad for p in self.params if p.grad is not None]).to(
                self.dtype
            )
        return self._gradients

    def _view(self, x: Tensor) -> Tensor:
        return as_matrix(x, self.group["kernel"]) if self.group["stiefel"] else x

    def _stack(self, xs: list[Tensor]) -> Tensor:
        return self._together([self._view(x) for x in xs])

    def _together(self, xs: list[Tensor]) -> Tensor:
        return xs[0] if len(xs) == 1 else torch.stack(xs)

    def _apart(self, x: Tensor) -> list[Tensor]:
        return [x] if len(self.params) == 1 else list(x.unbind())

    def _like(self, p: Tensor, x: Tensor) -> Tensor:
        """A point of the stack in the parameter's own shape."""
        return as_weight(x, p, self.group["kernel"]) if self.group["stiefel"] else x

    def _master(self, p: Tensor) -> Tensor:
        """The parameter in float32: what it was before rounding, unless somebody has written to it since."""
        if "master" not in self.state[p]:
            x = p.float()
            if self.group["stiefel"]:
                # Rounding to bfloat16 may be more than one pass of the series mends.
                x = self._like(p, stiefel.polar(stiefel.polar(self._view(x))))
            self.state[p]["master"] = x.clone(memory_format=torch.contiguous_format)
            return x
        master = self.state[p]["master"]
        return torch.where(master.to(p.dtype) == p, master, p.float())
