"""Parameters of one shape, updated together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..manifolds import stiefel

HALF = (torch.float16, torch.bfloat16)


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
            alike[(p.shape, p.dtype, p.device) if group["stiefel"] else i].append(p)
    for params in alike.values():
        yield Batch(params, group, state)


def _without_overflow(g: Tensor) -> Tensor:
    """Matrices with no entry above the root of the largest number, scaled down to that: no sum of products overflows then."""
    parts = torch.view_as_real(g).flatten(-2) if g.is_complex() else g
    return g * (torch.finfo(g.dtype).max ** 0.5 / parts.abs().amax((-2, -1), keepdim=True)).clamp(max=1)


class Batch:
    """K parameters of one shape as one stack: ``(K, *, N, M)`` on the manifold, else ``(1, *)``.

    State is kept parameter by parameter in the parameter's own shape; for a half-precision one in float32, its value too.
    """

    def __init__(self, params: list[Tensor], group: dict[str, Any], state: dict[Tensor, Any]) -> None:
        self.params, self.group, self.state = params, group, state
        self.dtype = working(params[0].dtype)

    def points(self) -> Tensor:
        """Where the parameters are, in working precision."""
        return self._stack([self._master(p) if p.dtype in HALF else p for p in self.params])

    def gradients(self) -> Tensor:
        """Which way is up (``maximize``: down). One with an entry that is not finite counts as zero, a huge one as smaller."""
        g = self._stack([p.grad for p in self.params if p.grad is not None]).to(self.dtype)
        finite = g.isfinite()
        finite = finite.all(-1, keepdim=True).all(-2, keepdim=True) if self.group["stiefel"] else finite.all()
        g = torch.where(finite, g, 0)
        g = _without_overflow(g) if self.group["stiefel"] else g
        return -g if self.group["maximize"] else g

    def move(self, points: Tensor) -> None:
        """Puts the parameters there."""
        for p, x in zip(self.params, points.unbind(), strict=True):
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
        for p, x in zip(self.params, value.unbind(), strict=True):
            self.state[p][key].copy_(self._like(p, x))

    def read_numbers(self, key: str, shape: tuple[int, ...] = ()) -> Tensor:
        """Real numbers ``shape`` a parameter, ``(K, *shape)``; zero at first."""
        for p in self.params:
            if key not in self.state[p]:
                self.state[p][key] = torch.zeros(shape, dtype=real(self.dtype), device=p.device)
        return torch.stack([self.state[p][key] for p in self.params])

    def write_numbers(self, key: str, value: Tensor) -> None:
        """Keeps what :meth:`read_numbers` will give."""
        for p, x in zip(self.params, value.unbind(), strict=True):
            self.state[p][key].copy_(x)

    def count(self) -> Tensor:
        """How many steps each parameter has taken, this one included, broadcast to the stack."""
        for p in self.params:
            if "step" not in self.state[p]:
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            self.state[p]["step"] += 1
        steps = torch.stack([self.state[p]["step"] for p in self.params])
        return steps.to(real(self.dtype)).reshape(-1, *[1] * self._view(self.params[0]).dim())

    def _view(self, x: Tensor) -> Tensor:
        return as_matrix(x, self.group["kernel"]) if self.group["stiefel"] else x

    def _stack(self, xs: list[Tensor]) -> Tensor:
        views = [self._view(x) for x in xs]
        return views[0].unsqueeze(0) if len(views) == 1 else torch.stack(views)

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
