r"""The loop over time and its adjoint, written by hand in torch.

$h_t = f(Q h_{t-1} + x_t + b)$; backwards $\delta_t = f'(z_t)\,(g_t + Q^H\delta_{t+1})$, and the transition's gradient
$\sum_t \delta_t h_{t-1}^H$ is one matrix product over all steps of a chunk. What is kept between the two is the memory mode's:

- ``store``: every state (the outputs); for abs every z.
- ``checkpoint``: the state at the start of each of $\sqrt T$ chunks; a chunk is run again before its adjoint.
- ``reversible``: the last state and a sign bit a unit; states are recovered backwards, $h_{t-1} = Q^H(z_t - x_t - b)$.

Sequences of unequal length are packed as torch packs them: step t has ``sizes[t]`` rows, never more than the step before.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .nonlinearities import Nonlinearity
from .transition import Transition, mapped, mapped_back, rows_like


class Rollout(NamedTuple):
    """One recurrence: its constants, the rows of each step, and what is kept.

    Tensors over time are flat, ``(sum of sizes, N)``; those of x may have K columns that ``weight (N, K)`` maps. Of a
    convolution they are images, ``(sum of sizes, C, H, W)``.
    """

    transition: Transition
    bias: Tensor | None
    weight: Tensor | None
    f: Nonlinearity
    sizes: list[int]
    memory: str
    last: bool
    loops: ModuleType

    @property
    def kept_states(self) -> int:
        """How many rows of states are written: all or none."""
        return total(self.sizes) if keeps_states(self.f, self.memory, self.last) else 0

    @property
    def chunks(self) -> list[tuple[int, int]]:
        steps = len(self.sizes)
        size = chunk_size(steps, self.memory, self.loops)
        return [(start, min(start + size, steps)) for start in range(0, steps, max(size, 1))]

    def inputs(self, rows: Tensor) -> Tensor:
        """What is added to Qh, but for the bias, at each row of a chunk of x."""
        return rows if self.weight is None else mapped(rows, self.weight)


def keeps_states(f: Nonlinearity, memory: str, last: bool) -> bool:
    """Return whether states are written: if they are wanted or, for the adjoint, not known from z."""
    return not last or (memory == "store" and not f.keeps_z)


def chunk_size(steps: int, memory: str, loops: ModuleType) -> int:
    """Return how many steps a chunk has."""
    if memory == "store":
        return steps
    if memory == "checkpoint":
        # The number of steps may be a compiler's symbol.
        return math.ceil(torch.sym_sqrt(steps))
    return loops.CHUNK


def total(sizes: list[int]) -> int:
    """Their sum; they never grow, so that equal ends mean equal sizes."""
    return len(sizes) * sizes[0] if sizes and sizes[0] == sizes[-1] else sum(sizes)


def forward(x: Tensor, h0: Tensor, rollout: Rollout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The states of every step (empty if none is wanted), each sequence's last state, and what the adjoint needs."""
    sizes, f, memory = rollout.sizes, rollout.f, rollout.memory
    kept = rollout.kept_states
    states = rows_like(h0, kept)
    z = rows_like(h0, total(sizes)) if f.keeps_z and memory == "store" else None
    bits, starts, ended = [], [], []
    h, at = h0, 0
    for start, stop in rollout.chunks:
        chunk = sizes[start:stop]
        size = total(chunk)
        into = states[at : at + size] if kept else None
        signs = f.keeps_z and memory == "reversible"
        before = z[at : at + size] if z is not None else rows_like(h0, size) if signs else None
        if memory == "checkpoint":
            starts.append(h[: chunk[0]])
        end = rollout.loops.run(
            rollout.inputs(x[at : at + size]),
            h,
            into,
            before,
            chunk,
            rollout.transition,
            f,
            rollout.bias,
        )
        if before is not None and memory == "reversible":
            bits.append(_pack(before.signbit()))
        going = sizes[stop] if stop < len(sizes) else 0
        ended.append(end[going:] if going else end)
        h = end[:going]
        at += size
    ended = [rows for rows in reversed(ended) if rows.shape[0]]
    hn = h0.clone() if not ended else ended[0] if len(ended) == 1 else torch.cat(ended)
    if z is None:
        z = torch.cat(bits) if bits else torch.empty(0, dtype=torch.uint8, device=x.device)
    return states, hn, z, torch.cat(starts) if starts else rows_like(h0, 0)


def _pack(signs: Tensor) -> Tensor:
    """Eight signs a byte."""
    flat = torch.nn.functional.pad(
        signs.reshape(-1).to(torch.uint8), (0, -signs.numel() % 8)
    ).reshape(-1, 8)
    return (flat << torch.arange(8, dtype=torch.uint8, device=signs.device)).sum(
        -1, dtype=torch.uint8
    )


def _unpack(bits: Tensor, shape: tuple[int, ...]) -> Tensor:
    flat = (bits[:, None] >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1
    return flat.reshape(-1)[: math.prod(shape)].reshape(shape).bool()


def backward(
    g: Tensor | None, gn: Tensor | None, x: Tensor | None, h0: Tensor, rollout: Rollout, states: Tensor, hn: Tensor,
    signs: Tensor, starts: Tensor,
) -> tuple[Tensor, Tensor, list[Tensor | None], Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, h0, the transition's tensors, bias and weight; ``x`` may be None if every state was stored."""
    sizes, f, weight, memory, shape = (
        rollout.sizes,
        rollout.f,
        rollout.weight,
        rollout.memory,
        h0.shape[1:],
    )
    at, bit, first = total(sizes), signs.shape[0], starts.shape[0]
    dx = rows_like(h0 if x is None or weight is None else x, at)
    dweight = dbias = None
    dq: list[Tensor | None] = []
    # Of the step after a chunk: its states before it, and the gradient that reaches them.
    none = h = carry = h0[:0]
    for start, stop in reversed(rollout.chunks):
        chunk = sizes[start:stop]
        size = total(chunk)
        at -= size
        part = none if x is None else x[at : at + size]
        z, before, known = None, h0, states[at : at + size]
        if memory == "store":
            z = signs[at : at + size] if f.keeps_z else None
        elif memory == "checkpoint":
            first -= chunk[0]
            before = starts[first : first + chunk[0]]
            z = rows_like(h0, size) if f.keeps_z else None
            known = None if f.keeps_z else rows_like(h0, size)
            rollout.loops.run(
                rollout.inputs(part), before, known, z, chunk, rollout.transition, f, rollout.bias
            )
        else:
            negative = None
            if f.keeps_z:
                used = -(-size * shape.numel() // 8)
                bit -= used
                negative = _unpack(signs[bit : bit + used], (size, *shape))
            known, before = rollout.loops.recover(
                rollout.inputs(part), h, hn, negative, chunk, rollout.transition, rollout.bias
            )
            z = known if f.keeps_z else None
            h = before
        if z is not None and not (memory == "store" and rollout.kept_states):
            known = f.define(z, rollout.bias if f.threshold else None)
        deltas = dx[at : at + size] if weight is None else rows_like(h0, size)
        outside = None if g is None else g[at : at + size]
        transition, loops = rollout.transition, rollout.loops
        carry, along, found = loops.adjoint(
            outside, carry, gn, deltas, known, before, z, chunk, transition, f, rollout.bias
        )
        dq = (
            [None if p is None else p.add_(more) for p, more in zip(dq, found, strict=True)]
            if dq
            else list(found)
        )
        dbias = along if dbias is None else dbias.add_(along)
        if weight is not None:
            dx[at : at + size], more = mapped_back(deltas, part, weight)
            dweight = more if dweight is None else dweight.add_(more)
    if sizes:
        return dx, carry, dq, dbias, dweight
    dbias, dweight = (None if p is None else torch.zeros_like(p) for p in (rollout.bias, weight))
    return (
        dx,
        torch.zeros_like(h0) if gn is None else gn,
        [torch.zeros_like(p) for p in rollout.transition],
        dbias,
        dweight,
    )
