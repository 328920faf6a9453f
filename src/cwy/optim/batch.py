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

# Points that were rounded to a narrower dtype, even bfloat16, are off by less.
ROUNDED = 0.1

# ``dtype.to_real()`` would break the graph of a compiler.
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a parameter of this dtype is updated."""
    if dtype in HALF:
        return torch.float32
    return dtype


def as_matrix(x: Tensor, kernel: bool) -> Tensor:
    """Return a weight as ``(*, N, M)`` with N >= M.

    A kernel is flattened from dimension 1. A wide matrix is transposed.
    """
    if kernel:
        x = x.flatten(1)
    if x.shape[-2] < x.shape[-1]:
        return x.mH
    return x


def as_weight(x: Tensor, like: Tensor, kernel: bool) -> Tensor:
    """Return the weight of which :func:`as_matrix` made the matrix ``x (*, N, M)``."""
    matrix = like
    if kernel:
        matrix = like.flatten(1)
    if matrix.shape[-2] < matrix.shape[-1]:
        x = x.mH
    if x.shape == like.shape:
        return x
    return x.reshape(like.shape)


def batches(group: dict[str, Any], state: dict[Tensor, Any]) -> Iterator[Batch]:
    """Yield the parameters of a group that have a gradient.

    Parameters on the manifold that have one shape come together, free ones one by one.
    """
    alike: defaultdict[Any, list[int]] = defaultdict(list)
    for i, p in enumerate(group["params"]):
        if p.grad is None:
            continue
        if group["stiefel"]:
            alike[p.shape, p.dtype, p.device].append(i)
        else:
            alike[i].append(i)
    for indices in alike.values():
        yield Batch(indices, group, state)


def readable(p: Tensor) -> bool:
    """Return whether the host can read a value of this tensor without waiting for a device."""
    return p.is_cpu and not torch.compiler.is_compiling()


def read_largest(x: Tensor) -> float:
    """Return the largest of some numbers, or NaN if one is NaN."""
    if x.numel() == 1:
        return x.item()
    return x.max().item()


def largest_product(dtype: torch.dtype) -> float:
    """Return the root of the largest number: products of larger ones overflow."""
    return torch.finfo(dtype).max ** 0.5


def _largest(g: Tensor) -> Tensor:
    """Return the largest absolute value in each matrix, ``(*, 1, 1)``.

    Real and imaginary parts count as numbers of their own.
    """
    if g.is_complex():
        g = torch.view_as_real(g.resolve_conj()).flatten(-2)
    return torch.linalg.vector_norm(g, torch.inf, dim=(-2, -1), keepdim=True)


class Batch:
    """Hold K parameters of one shape as one stack: ``(K, *, N, M)`` on the manifold.

    A single parameter keeps its shape ``(*, N, M)``. State is kept per parameter, in the shape of
    the parameter. A half-precision parameter has float32 state, which includes its value.

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
        self.dtype = working_dtype(self.params[0].dtype)
        self.on_manifold: bool = group["stiefel"]
        self._points: Tensor | None = None
        self._given: Tensor | None = None
        # The largest entry of the gradient, where the host has read it.
        self._largest_read = math.inf

    def points(self) -> Tensor:
        """Return where the parameters are, in working precision."""
        if self._points is None:
            values = self.params
            if self.params[0].dtype in HALF:
                values = [self._master(p) for p in self.params]
            self._points = self._stack(values)
        return self._points

    def given(self) -> Tensor:
        """Return the gradients as they were given, in working precision."""
        if self._given is None:
            gradients = [p.grad for p in self.params if p.grad is not None]
            self._given = self._stack(gradients)
            if self._given.dtype != self.dtype:
                self._given = self._given.to(self.dtype)
        return self._given

    def is_one_square_matrix(self) -> bool:
        """Return whether this is one N x N matrix on the manifold that the host can read."""
        if len(self.params) > 1 or not self.on_manifold or not readable(self.params[0]):
            return False
        x = self.points()
        return x.dim() == 2 and x.shape[0] == x.shape[1]

    def is_finite(self) -> bool:
        """Return whether every gradient is finite. The host reads a value for it."""
        # A number that the host has read would become a constant of the compiled step.
        if not self.on_manifold or torch.compiler.is_compiling():
            return bool(self.given().isfinite().all())
        self._largest_read = read_largest(_largest(self.given()))
        return math.isfinite(self._largest_read)

    def error(self) -> Tensor:
        """Compute the largest entry of $X^H X - I$ of each matrix, ``(K, *, 1, 1)``."""
        error = stiefel.gram_error(self.points())
        return torch.linalg.vector_norm(error, torch.inf, dim=(-2, -1), keepdim=True)

    def gradients(self) -> Tensor:
        """Return the direction of ascent, or of descent with ``maximize``.

        A gradient with an entry that is not finite counts as zero. A huge one is scaled down.
        """
        g = self.given()
        if not self.on_manifold:
            g = torch.where(g.isfinite().all(), g, 0)
        elif not self._largest_read <= largest_product(self.dtype):
            largest = _largest(g)
            g = torch.where(largest.isfinite(), g, 0)
            # No sum of products overflows then.
            ratio = largest_product(self.dtype) / largest.nan_to_num(posinf=0.0)
            g = g * ratio.clamp(max=1)
        if self.group["maximize"]:
            return -g
        return g

    def move(self, points: Tensor) -> None:
        """Write these points to the parameters.

        A parameter that the host cannot check moves only if it was on the manifold.
        """
        if self.on_manifold and not readable(self.params[0]):
            points = torch.where(self.error() <= ROUNDED, points, self.points())
        for p, x in zip(self.params, self._apart(points), strict=True):
            x = self._like(p, x)
            if p.dtype in HALF:
                self.state[p]["master"].copy_(x)
            p.copy_(x)

    def has_state(self, keys: tuple[str, ...]) -> bool:
        """Return whether every parameter has state under these keys."""
        # The state is a defaultdict: reading it for a parameter without state would add one.
        return all(key in self.state.get(p, ()) for p in self.params for key in keys)

    def read(self, key: str) -> Tensor:
        """Return state of the parameters' shape, stacked like them. It is zero at first."""
        for p in self.params:
            if key not in self.state[p]:
                self.state[p][key] = torch.zeros_like(p, dtype=self.dtype)
        return self._stack([self.state[p][key] for p in self.params])

    def write(self, key: str, value: Tensor) -> None:
        """Keep what :meth:`read` will return."""
        for p, x in zip(self.params, self._apart(value), strict=True):
            self.state[p][key].copy_(self._like(p, x))

    def read_numbers(self, key: str, like: Tensor) -> Tensor:
        """Return real numbers per parameter, of the shape of ``like``. They are zero at first."""
        for p, x in zip(self.params, self._apart(like), strict=True):
            if key not in self.state[p]:
                self.state[p][key] = torch.zeros_like(x, dtype=self._real_dtype())
        return self._together([self.state[p][key] for p in self.params])

    def write_numbers(self, key: str, value: Tensor) -> None:
        """Keep what :meth:`read_numbers` will return."""
        for p, x in zip(self.params, self._apart(value), strict=True):
            self.state[p][key].copy_(x)

    def read_number(self, key: str) -> float:
        """Return the number that the only parameter has under a key."""
        return self.state[self.params[0]][key].item()

    def write_number(self, key: str, value: float) -> None:
        """Keep what :meth:`read_number` will return."""
        self.state[self.params[0]][key].fill_(value)

    def count(self) -> Tensor:
        """Count one more step of each parameter, and return the counts broadcast to the stack."""
        for p in self.params:
            if "step" not in self.state[p]:
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            self.state[p]["step"] += 1
        steps = self._together([self.state[p]["step"] for p in self.params])
        steps = steps.to(self._real_dtype())
        return steps.reshape((*steps.shape, *[1] * self._view(self.params[0]).dim()))

    def _real_dtype(self) -> torch.dtype:
        return _REAL.get(self.dtype, self.dtype)

    def _view(self, x: Tensor) -> Tensor:
        if self.on_manifold:
            return as_matrix(x, self.group["kernel"])
        return x

    def _stack(self, xs: list[Tensor]) -> Tensor:
        return self._together([self._view(x) for x in xs])

    def _together(self, xs: list[Tensor]) -> Tensor:
        if len(xs) == 1:
            return xs[0]
        return torch.stack(xs)

    def _apart(self, x: Tensor) -> list[Tensor]:
        if len(self.params) == 1:
            return [x]
        return list(x.unbind())

    def _like(self, p: Tensor, x: Tensor) -> Tensor:
        """Return a point of the stack in the parameter's own shape."""
        if self.on_manifold:
            return as_weight(x, p, self.group["kernel"])
        return x

    def _master(self, p: Tensor) -> Tensor:
        """Return the parameter in float32: as before rounding, unless it was written to since."""
        if "master" not in self.state[p]:
            x = p.float()
            if self.on_manifold:
                # Rounding to bfloat16 may be more than one pass of the series corrects.
                x = self._like(p, stiefel.polar(stiefel.polar(self._view(x))))
            self.state[p]["master"] = x.clone(memory_format=torch.contiguous_format)
            return x
        master = self.state[p]["master"]
        return torch.where(master.to(p.dtype) == p, master, p.float())
