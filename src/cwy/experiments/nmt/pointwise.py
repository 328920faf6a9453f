"""The part of a cell after its products: one class per kind of cell, each with its definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...ops.recurrence.nonlinearities import NONLINEARITIES

State = tuple[Tensor, ...]
"""h ``(B, N)``, and c for an LSTM."""


@dataclass(frozen=True, eq=False)
class Pointwise:
    """Compute the next state from the word, the context and the product with the state.

    Attributes:
        inputs: numbers per unit that the word gives.
        contexts: how many of these the context is added to, from the first.
        products: numbers per unit of the product with the state.
        kept: numbers per unit that a kernel keeps for the backward pass.
        nonlinearity: its name.
        threshold: that of modReLU, ``(N,)``.
        vector: ``(N,)``, the factors d of :class:`Thin` or the bias b of :class:`Gru`.
    """

    inputs: ClassVar[int]
    contexts: ClassVar[int]
    products: ClassVar[int]
    kept: ClassVar[int]
    nonlinearity: str = "tanh"
    threshold: Tensor | None = None
    vector: Tensor | None = None

    def advance(self, x: Tensor, context: Tensor | None, r: Tensor, state: State) -> State:
        """Return the next state.

        Args:
            x: of a word, ``(B, inputs N)``.
            context: ``(B, contexts N)``, or None in an encoder.
            r: R h, ``(B, products N)``.
            state: the one before.
        """
        raise NotImplementedError

    def _apply(self, z: Tensor) -> Tensor:
        return NONLINEARITIES[self.nonlinearity].define(z, self.threshold)


def _sum(x: Tensor, context: Tensor | None) -> Tensor:
    """Return the sum of x and the context, if there is one."""
    if context is None:
        return x
    return x + context


class Plain(Pointwise):
    """Compute $h = f(x + r)$."""

    inputs = contexts = products = kept = 1

    def advance(self, x: Tensor, context: Tensor | None, r: Tensor, state: State) -> State:
        return (self._apply(_sum(x, context) + r),)


class Gated(Pointwise):
    r"""Compute $(1 - z) \odot h + z \odot f(x + r)$ with $z = \sigma(x_z + r_z)$."""

    inputs = contexts = products = 2
    kept = 3

    def advance(self, x: Tensor, context: Tensor | None, r: Tensor, state: State) -> State:
        (h,) = state
        x_new, x_gate = _sum(x, context).chunk(2, -1)
        r_new, r_gate = r.chunk(2, -1)
        return (torch.lerp(h, self._apply(x_new + r_new), torch.sigmoid(x_gate + r_gate)),)


class Thin(Pointwise):
    r"""Compute $(1 - z) \odot h + z \odot f(x + r)$ with $z = \sigma(x_z + d \odot r)$.

    d is the vector.
    """

    inputs = 2
    contexts = products = 1
    kept = 3

    def advance(self, x: Tensor, context: Tensor | None, r: Tensor, state: State) -> State:
        assert self.vector is not None
        (h,) = state
        x_new, x_gate = x.chunk(2, -1)
        gate = torch.sigmoid(x_gate + self.vector * r)
        return (torch.lerp(h, self._apply(_sum(x_new, context) + r), gate),)


class Gru(Pointwise):
    r"""Compute $(1 - z) \odot \tanh(x_n + s \odot (r_n + b)) + z \odot h$.

    The gates are $s = \sigma(x_s + r_s)$ and $z = \sigma(x_z + r_z)$. b is the vector, or zero.
    """

    inputs = contexts = products = 3
    kept = 4

    def advance(self, x: Tensor, context: Tensor | None, r: Tensor, state: State) -> State:
        (h,) = state
        x_reset, x_update, x_new = _sum(x, context).chunk(3, -1)
        r_reset, r_update, r_new = r.chunk(3, -1)
        if self.vector is not None:
            r_new = r_new + self.vector
        reset = torch.sigmoid(x_reset + r_reset)
        update = torch.sigmoid(x_update + r_update)
        return (torch.lerp(torch.tanh(x_new + reset * r_new), h, update),)


class Lstm(Pointwise):
    r"""Compute $h = \sigma(o) \odot \tanh(c)$.

    The new c is $\sigma(f) \odot c + \sigma(i) \odot \tanh(g)$, and i, f, g and o are the parts of
    x + r.
    """

    inputs = contexts = products = kept = 4

    def advance(self, x: Tensor, context: Tensor | None, r: Tensor, state: State) -> State:
        _, c = state
        i, f, g, o = (_sum(x, context) + r).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


CELLS: tuple[type[Pointwise], ...] = (Plain, Gated, Thin, Gru, Lstm)
"""All kinds. A kernel knows them by their place."""
