r"""The transition as the loop sees it: formed, or as $\mathrm{diag}(d) - W Y^H$.

Rows are vectors: ``h (B, N)``. Each has ``step`` ($x + Qh$), ``back`` ($g + Q^H\delta$) and ``grad``, the gradient of its
tensors from all deltas and the states before them, in one matrix product each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Formed(NamedTuple):
    """Q itself, ``(N, N)``."""

    q: Tensor

    def step(self, x: Tensor, h: Tensor, out: Tensor) -> None:
        torch.addmm(x, h, self.q.mT, out=out)

    def back(self, g: Tensor, delta: Tensor, out: Tensor) -> None:
        torch.addmm(g, delta, self.q.conj(), out=out)

    def grad(self, deltas: Tensor, before: Tensor) -> tuple[Tensor, ...]:
        return (deltas.mT @ before.conj(),)


class Factored(NamedTuple):
    r"""$Q = \mathrm{diag}(d) - W Y^H$: ``w, y (N, L)``, ``d (N,)``."""

    w: Tensor
    y: Tensor
    d: Tensor

    def step(self, x: Tensor, h: Tensor, out: Tensor) -> None:
        torch.addcmul(x, h, self.d, out=out)
        out.addmm_(h @ self.y.conj(), self.w.mT, alpha=-1)

    def back(self, g: Tensor, delta: Tensor, out: Tensor) -> None:
        c = delta @ self.w.conj()
        torch.addcmul(g, delta, self.d.conj(), out=out)
        out.addmm_(c, self.y.mT, alpha=-1)

    def grad(self, deltas: Tensor, before: Tensor) -> tuple[Tensor, ...]:
        dw = -(deltas.mT @ (before @ self.y.conj()).conj())
        dy = -(before.mT @ (deltas @ self.w.conj()).conj())
        return dw, dy, (deltas * before.conj()).sum(0)


Transition = Formed | Factored


def of(tensors: list[Tensor]) -> Transition:
    return Formed(*tensors) if len(tensors) == 1 else Factored(*tensors)
