"""The loops over the steps of a chunk: forward, adjoint, and backwards from the last state.

Tensors over time are flat; step t has the ``sizes[t]`` rows after those of the steps before it. ``signs`` is None unless f
needs the sign of z; ``bias`` is None unless it is a threshold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import graphs
from .nonlinearities import Nonlinearity
from .transition import Transition, of


def run(
    x: Tensor, h: Tensor, states: Tensor, signs: Tensor | None, sizes: list[int], q: Transition, f: Nonlinearity,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Writes the states of all steps from the inputs x and the state before them; returns the last."""
    if not graphs.worth(x, sizes):
        return _run(x, h, states, signs, sizes, q, f, bias)
    batch, parts = sizes[0], len(q)
    for start, count in graphs.blocks(len(sizes)):
        rows, block = slice(start * batch, (start + count) * batch), [batch] * count
        of_block = None if signs is None else signs[rows]
        if count not in graphs.BLOCKS:
            h = _run(x[rows], h, states[rows], of_block, block, q, f, bias)
            continue

        def record(x: Tensor, h: Tensor, *rest: Tensor, block=block) -> tuple[Tensor, ...]:
            made, flips = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool) if f.signed else None
            _run(x, h, made, flips, block, of([*rest[:parts]]), f, rest[parts] if len(rest) > parts else None)
            return (made,) if flips is None else (made, flips)

        made, *flips = graphs.replay(record, ("run", f.name, bias is None), x[rows], h, *q, *([] if bias is None else [bias]))
        states[rows] = made
        if of_block is not None:
            of_block.copy_(flips[0])
        h = states[rows][-batch:]
    return h


def _run(x, h, states, signs, sizes, q, f, bias):
    flips = [None] * len(sizes) if signs is None else signs.split(sizes)
    for xt, state, flip, size in zip(x.split(sizes), states.split(sizes), flips, sizes, strict=True):
        q.step(xt, h[:size], state)
        if flip is not None:
            torch.signbit(state, out=flip)
        f.step_(state, bias)
        h = state
    return h


def adjoint(
    deltas: Tensor, carry: Tensor, gn: Tensor | None, states: Tensor, signs: Tensor | None, sizes: list[int], q: Transition,
    f: Nonlinearity, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Turns the gradients of all states into deltas, in place; returns the gradient of the state before them.

    ``carry`` is the gradient that comes from the steps after; ``gn`` that of the last state of each sequence.
    """
    if not graphs.worth(deltas, sizes):
        return _adjoint(deltas, carry, gn, states, signs, sizes, q, f, bias)
    batch, parts = sizes[0], len(q)
    if carry.shape[0] == 0:
        # Every sequence ends here.
        carry = torch.zeros_like(deltas[:batch]) if gn is None else gn
    for start, count in reversed(list(graphs.blocks(len(sizes)))):
        rows, block = slice(start * batch, (start + count) * batch), [batch] * count
        of_block = None if signs is None else signs[rows]
        if count not in graphs.BLOCKS:
            carry = _adjoint(deltas[rows], carry, None, states[rows], of_block, block, q, f, bias)
            continue

        def record(deltas: Tensor, carry: Tensor, states: Tensor, *rest: Tensor, block=block) -> tuple[Tensor, ...]:
            made, extra = deltas.clone(), [*rest[parts:]]
            flips = extra.pop() if f.signed else None
            threshold = extra.pop() if extra else None
            return made, _adjoint(made, carry, None, states, flips, block, of([*rest[:parts]]), f, threshold)

        extra = [*([] if bias is None else [bias]), *([] if of_block is None else [of_block])]
        made, carry = graphs.replay(record, ("adjoint", f.name, bias is None), deltas[rows], carry, states[rows], *q, *extra)
        deltas[rows] = made
    return carry.clone()


def _adjoint(deltas, carry, gn, states, signs, sizes, q, f, bias):
    steps, values = deltas.split(sizes), states.split(sizes)
    flips = [None] * len(sizes) if signs is None else signs.split(sizes)
    after = carry.shape[0]
    steps[-1][:after] += carry
    into = carry
    for t in range(len(sizes) - 1, -1, -1):
        delta = steps[t]
        if gn is not None and after < sizes[t]:
            delta[after:] += gn[after : sizes[t]]
        delta.copy_(f.back(delta, values[t], flips[t], bias))
        into = steps[t - 1][: sizes[t]] if t else torch.zeros_like(delta)
        q.back_(into, delta)
        after = sizes[t]
    return into


def recover(x: Tensor, h: Tensor, hn: Tensor, signs: Tensor | None, sizes: list[int], q: Transition) -> tuple[Tensor, Tensor]:
    """The states of all steps from the one after them, and the one before; ``hn`` has those of sequences that end here."""
    states = hn.new_empty(sum(sizes), hn.shape[-1])
    inputs, values = x.split(sizes), states.split(sizes)
    flips = None if signs is None else signs.split(sizes)
    for t in range(len(sizes) - 1, -1, -1):
        known = h.shape[0]
        values[t][:known] = h
        values[t][known:] = hn[known : sizes[t]]
        z = values[t] if flips is None else torch.where(flips[t], -values[t], values[t])
        h = torch.zeros_like(z)
        q.back_(h, z - inputs[t])
    return states, h
