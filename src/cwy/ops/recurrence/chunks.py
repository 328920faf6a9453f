r"""The rollout and its adjoint in chunks of steps.

$h_t = f(Q h_{t-1} + x_t + b)$, and backwards $\delta_t = f'(z_t)\,(g_t + Q^H\delta_{t+1})$. The
gradient of the transition, $\sum_t \delta_t h_{t-1}^H$, is one matrix product over all steps of a
chunk. The memory mode decides what is kept for the adjoint:

- ``store``: every state (the outputs), and every z if f keeps it. There is one chunk.
- ``checkpoint``: the states at the start of each of $\sqrt T$ chunks. A chunk is run again before
  its adjoint.
- ``reversible``: the last state and one sign bit per unit and step. States are recovered
  backwards, $h_{t-1} = Q^H(z_t - x_t - b)$.

Sequences of unequal length are packed as torch packs them: step t has ``sizes[t]`` rows, never more
than the step before.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .convolved import rows_like
from .nonlinearities import Nonlinearity
from .steps import Adjoint, Cell, Chunk, StepLoops


class Plan(NamedTuple):
    """Describe one recurrence, ready to run: its step, the rows of each step, and what is kept.

    Tensors over time are flat, ``(sum of sizes, N)``. Those of a convolution are images,
    ``(sum of sizes, C, H, W)``.

    Attributes:
        cell: the step.
        weight: maps the inputs, or None.
        sizes: rows of each step.
        memory: "store", "checkpoint", "reversible", or "nothing" if there is no adjoint.
        last: whether only the last states are wanted.
        loops: who runs the steps of a chunk.
        rounded: the dtype of the states that are returned, None if it is that of the computation.
    """

    cell: Cell
    weight: Tensor | None
    sizes: list[int]
    memory: str
    last: bool
    loops: StepLoops
    rounded: torch.dtype | None = None

    @property
    def keeps_states(self) -> bool:
        """Return whether states are written in full precision."""
        return keeps_states(self.cell.f, self.memory, self.last, self.rounded)

    def chunks(self) -> list[tuple[int, int]]:
        """Return the first step of each chunk and the step after it."""
        steps = len(self.sizes)
        size = chunk_size(steps, self.memory, self.loops)
        return [(start, min(start + size, steps)) for start in range(0, steps, max(size, 1))]

    def inputs(self, rows: Tensor) -> Tensor:
        """Return what is added to Qh, apart from the bias, at each row of x."""
        if self.weight is None:
            return rows
        return self.cell.transition.map_inputs(rows.to(self.weight.dtype), self.weight)


class Results(NamedTuple):
    """Hold what the forward pass returns and keeps.

    Attributes:
        states: of every step, or none.
        hn: the last state of each sequence.
        kept_z: z of every step ("store"), or its sign bits ("reversible"), or nothing.
        starts: the states before each chunk ("checkpoint"), or the states of every step in full
            precision, if ``states`` are rounded ("store"), or none.
    """

    states: Tensor
    hn: Tensor
    kept_z: Tensor
    starts: Tensor


class Saved(NamedTuple):
    """Hold what the backward pass reads.

    Attributes:
        x: the inputs, or None if every state was stored and no weight maps them.
        h0: the first states.
        results: of the forward pass.
        x_dtype: the dtype of the inputs.
    """

    x: Tensor | None
    h0: Tensor
    results: Results
    x_dtype: torch.dtype

    def states(self, plan: Plan) -> Tensor:
        """Return the stored states in full precision."""
        if plan.rounded is None:
            return self.results.states
        return self.results.starts


class Gradients(NamedTuple):
    """Hold the gradients of all arguments, None for one that is absent or needs no gradient."""

    x: Tensor
    h0: Tensor
    transition: list[Tensor | None]
    bias: Tensor | None
    weight: Tensor | None


def keeps_states(
    f: Nonlinearity, memory: str, last: bool, rounded: torch.dtype | None = None
) -> bool:
    """Return whether states are written in full precision.

    They are if they are returned so, or if the adjoint can't do without them.
    """
    if not last and rounded is None:
        return True
    return memory == "store" and not f.keeps_z


def chunk_size(steps: int, memory: str, loops: StepLoops) -> int:
    """Return how many steps a chunk has."""
    if memory == "store":
        return steps
    if memory == "checkpoint":
        # The number of steps may be a compiler's symbol.
        return math.ceil(torch.sym_sqrt(steps))
    return loops.chunk


def total(sizes: list[int]) -> int:
    """Return the sum of sizes that never grow, so that equal ends mean equal sizes."""
    if sizes and sizes[0] == sizes[-1]:
        return len(sizes) * sizes[0]
    return sum(sizes)


def forward(x: Tensor, h0: Tensor, plan: Plan) -> Results:
    """Run all steps."""
    sizes = plan.sizes
    kept_rows = 0
    if plan.keeps_states:
        kept_rows = total(sizes)
    states = rows_like(h0, kept_rows)
    rounded = None
    if plan.rounded is not None and not plan.last:
        rounded = rows_like(h0, total(sizes), plan.rounded)
    keeper = _Keeper(plan, h0)
    ended = []
    h = h0
    at = 0
    for start, stop in plan.chunks():
        chunk = sizes[start:stop]
        rows = slice(at, at + total(chunk))
        into = None
        if kept_rows:
            into = states[rows]
        round_into = None
        if rounded is not None:
            round_into = rounded[rows]
        z = keeper.memory_for_z(rows)
        keeper.begin(h, chunk)
        inputs = plan.inputs(x[rows])
        end = plan.loops.run(plan.cell, chunk, inputs, h, states=into, z=z, rounded=round_into)
        keeper.finish(z)
        at = rows.stop
        if stop == len(sizes):
            ended.append(end)
        else:
            ended.append(end[sizes[stop] :])
            h = end[: sizes[stop]]
    hn = _joined(ended, h0)
    if plan.rounded is None:
        return Results(states, hn, keeper.kept_z(), keeper.kept_starts())
    if rounded is None:
        rounded = rows_like(h0, 0, plan.rounded)
    if plan.memory == "store":
        return Results(rounded, hn, keeper.kept_z(), states)
    return Results(rounded, hn, keeper.kept_z(), keeper.kept_starts())


def _joined(ended: list[Tensor], h0: Tensor) -> Tensor:
    """Return the last states of all sequences from those that ended in each chunk."""
    ended = [rows for rows in reversed(ended) if rows.shape[0]]
    if not ended:
        return h0.clone()
    if len(ended) == 1:
        return ended[0]
    return torch.cat(ended)


class _Keeper:
    """Keep what the backward pass needs of z and of the states before each chunk."""

    def __init__(self, plan: Plan, h0: Tensor) -> None:
        keeps_z = plan.cell.f.keeps_z
        self._keeps_bits = keeps_z and plan.memory == "reversible"
        self._keeps_starts = plan.memory == "checkpoint"
        self._like = h0
        self._bits: list[Tensor] = []
        self._starts: list[Tensor] = []
        self._z: Tensor | None = None
        if keeps_z and plan.memory == "store":
            self._z = rows_like(h0, total(plan.sizes))

    def memory_for_z(self, rows: slice) -> Tensor | None:
        """Return where z of these rows goes, None if it is not kept."""
        if self._z is not None:
            return self._z[rows]
        if self._keeps_bits:
            return rows_like(self._like, rows.stop - rows.start)
        return None

    def begin(self, h: Tensor, chunk: list[int]) -> None:
        """Keep the states before a chunk."""
        if self._keeps_starts:
            self._starts.append(h[: chunk[0]])

    def finish(self, z: Tensor | None) -> None:
        """Keep z of a chunk that has run."""
        if self._keeps_bits and z is not None:
            self._bits.append(_pack(z.signbit()))

    def kept_z(self) -> Tensor:
        """Return z of every step, or its sign bits, or nothing."""
        if self._z is not None:
            return self._z
        if self._bits:
            return torch.cat(self._bits)
        return torch.empty(0, dtype=torch.uint8, device=self._like.device)

    def kept_starts(self) -> Tensor:
        """Return the states before each chunk, or none."""
        if self._starts:
            return torch.cat(self._starts)
        return rows_like(self._like, 0)


def _pack(negative: Tensor) -> Tensor:
    """Return eight booleans per byte."""
    flat = negative.reshape(-1).to(torch.uint8)
    bits = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).reshape(-1, 8)
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits << places).sum(-1, dtype=torch.uint8)


def _unpack(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the booleans of :func:`_pack` in a shape."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed[:, None] >> places) & 1
    return bits.reshape(-1)[: math.prod(shape)].reshape(shape).bool()


def backward(
    plan: Plan, saved: Saved, grad_states: Tensor | None, grad_last: Tensor | None
) -> Gradients:
    """Run the adjoint of all steps.

    Args:
        plan: as in the forward pass.
        saved: its inputs and results.
        grad_states: gradient of the states, or None.
        grad_last: gradient of the last state of each sequence, or None.
    """
    if not plan.sizes:
        return _no_steps(plan, saved, grad_last)
    x = saved.x
    h0 = saved.h0
    weight = plan.weight
    like = h0
    if x is not None and weight is not None:
        like = x
    at = total(plan.sizes)
    dx = rows_like(like, at, saved.x_dtype)
    rounds = saved.x_dtype != h0.dtype
    sums = _Sums()
    rewind = _Rewind(plan, saved)
    carry = h0[:0]
    for start, stop in reversed(plan.chunks()):
        sizes = plan.sizes[start:stop]
        size = total(sizes)
        rows = slice(at - size, at)
        at = rows.start
        known = rewind.chunk(sizes, rows)
        deltas = dx[rows]
        rounded = None
        if weight is not None or rounds:
            deltas = rows_like(h0, size)
        if weight is None and rounds:
            rounded = dx[rows]
        outside = None
        if grad_states is not None:
            outside = grad_states[rows]
        found = plan.loops.adjoint(
            plan.cell,
            Chunk(sizes, outside, deltas, known.states, known.z, rounded),
            before=known.before,
            carry=carry,
            grad_last=grad_last,
        )
        carry = found.carry
        sums.add(found)
        if weight is not None:
            assert x is not None
            inputs = x[rows].to(deltas.dtype)
            dx[rows], more = plan.cell.transition.map_inputs_back(deltas, inputs, weight)
            sums.add_weight(more)
    return Gradients(dx, carry, sums.transition, sums.bias, sums.weight)


def _no_steps(plan: Plan, saved: Saved, grad_last: Tensor | None) -> Gradients:
    """Return the gradients of a recurrence without a step, whose last state is the first."""
    like = saved.h0
    if saved.x is not None and plan.weight is not None:
        like = saved.x
    dh0 = grad_last
    if dh0 is None:
        dh0 = torch.zeros_like(saved.h0)
    transition = [_zeros_like(tensor) for tensor in plan.cell.transition.tensors]
    dbias = _zeros_like(plan.cell.bias)
    dx = rows_like(like, 0, saved.x_dtype)
    return Gradients(dx, dh0, transition, dbias, _zeros_like(plan.weight))


def _zeros_like(x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    return torch.zeros_like(x)


class _Sums:
    """Add up the gradients of the constants over chunks."""

    def __init__(self) -> None:
        self.transition: list[Tensor | None] = []
        self.bias: Tensor | None = None
        self.weight: Tensor | None = None

    def add(self, found: Adjoint) -> None:
        """Add the gradients of the transition and of the bias from a chunk."""
        self.bias = _added(self.bias, found.bias)
        if not self.transition:
            self.transition = list(found.transition)
            return
        pairs = zip(self.transition, found.transition, strict=True)
        self.transition = [_added(sum_, more) for sum_, more in pairs]

    def add_weight(self, more: Tensor) -> None:
        """Add the gradient of the weight from a chunk."""
        self.weight = _added(self.weight, more)


def _added(sum_: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Return the sum, in the memory of the first."""
    if sum_ is None or more is None:
        return more
    return sum_.add_(more)


class _Known(NamedTuple):
    """Hold what the adjoint of a chunk reads.

    Attributes:
        states: of all steps.
        before: the states before the first step.
        z: of all steps if f keeps it, or None.
    """

    states: Tensor
    before: Tensor
    z: Tensor | None


class _Rewind:
    """Return the states of each chunk, from the last chunk to the first."""

    def __init__(self, plan: Plan, saved: Saved) -> None:
        self._plan = plan
        self._saved = saved
        results = saved.results
        # The ends of what is left of the sign bits and of the states before each chunk.
        self._bits_end = results.kept_z.shape[0]
        self._starts_end = results.starts.shape[0]
        # The states before the chunk that was recovered last.
        self._h = saved.h0[:0]

    def chunk(self, sizes: list[int], rows: slice) -> _Known:
        """Return what is known of a chunk, the one before the chunk of the last call."""
        if self._plan.memory == "store":
            return self._stored(rows)
        if self._plan.memory == "checkpoint":
            return self._run_again(sizes, rows)
        return self._recovered(sizes, rows)

    def _stored(self, rows: slice) -> _Known:
        states = self._saved.states(self._plan)
        if not self._plan.cell.f.keeps_z:
            return _Known(states[rows], self._saved.h0, None)
        z = self._saved.results.kept_z[rows]
        if self._plan.keeps_states:
            return _Known(states[rows], self._saved.h0, z)
        return _Known(self._states_of(z), self._saved.h0, z)

    def _run_again(self, sizes: list[int], rows: slice) -> _Known:
        h0 = self._saved.h0
        size = rows.stop - rows.start
        start = self._starts_end - sizes[0]
        before = self._saved.results.starts[start : self._starts_end]
        self._starts_end = start
        if not self._plan.cell.f.keeps_z:
            states = rows_like(h0, size)
            self._run(sizes, rows, before, states=states, z=None)
            return _Known(states, before, None)
        z = rows_like(h0, size)
        self._run(sizes, rows, before, states=None, z=z)
        return _Known(self._states_of(z), before, z)

    def _run(
        self,
        sizes: list[int],
        rows: slice,
        before: Tensor,
        *,
        states: Tensor | None,
        z: Tensor | None,
    ) -> None:
        plan = self._plan
        plan.loops.run(plan.cell, sizes, self._inputs(rows), before, states=states, z=z)

    def _recovered(self, sizes: list[int], rows: slice) -> _Known:
        keeps_z = self._plan.cell.f.keeps_z
        negative = None
        if keeps_z:
            negative = self._negative_of(rows.stop - rows.start)
        found = self._plan.loops.recover(
            self._plan.cell,
            sizes,
            x=self._inputs(rows),
            h=self._h,
            hn=self._saved.results.hn,
            negative=negative,
        )
        self._h = found.before
        if keeps_z:
            return _Known(self._states_of(found.z), found.before, found.z)
        return _Known(found.z, found.before, None)

    def _negative_of(self, size: int) -> Tensor:
        """Return whether z of so many rows is negative."""
        shape = self._saved.h0.shape[1:]
        start = self._bits_end - -(-size * shape.numel() // 8)
        packed = self._saved.results.kept_z[start : self._bits_end]
        self._bits_end = start
        return _unpack(packed, (size, *shape))

    def _inputs(self, rows: slice) -> Tensor:
        assert self._saved.x is not None
        return self._plan.inputs(self._saved.x[rows])

    def _states_of(self, z: Tensor) -> Tensor:
        cell = self._plan.cell
        return cell.f.define(z, cell.threshold)
