"""The loops over the steps of a chunk: forward, adjoint, and backwards from the last state.

Tensors over time are flat. Step t has the ``sizes[t]`` rows after those of the steps before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from .._precision import full_precision
from . import graphs
from .convolved import rows_like
from .nonlinearities import Nonlinearity
from .transition import Transition, sum_to


class Cell(NamedTuple):
    """Describe one step, $h = f(Qh + x + b)$.

    Attributes:
        transition: Q.
        f: the nonlinearity.
        bias: added to z, or the threshold of f, or None.
    """

    transition: Transition
    f: Nonlinearity
    bias: Tensor | None

    @property
    def added(self) -> Tensor | None:
        """Return the bias if it is added to z."""
        if self.f.threshold:
            return None
        return self.bias

    @property
    def threshold(self) -> Tensor | None:
        """Return the bias if it is the threshold of f."""
        if self.f.threshold:
            return self.bias
        return None

    @property
    def constants(self) -> list[Tensor]:
        """Return its tensors: those of the transition, and the bias if there is one."""
        if self.bias is None:
            return self.transition.tensors
        return [*self.transition.tensors, self.bias]

    def with_constants(self, constants: list[Tensor]) -> Cell:
        """Return the same step of other tensors, given as in :attr:`constants`."""
        parts = len(self.transition.tensors)
        bias = None
        if self.bias is not None:
            bias = constants[parts]
        return Cell(type(self.transition)(*constants[:parts]), self.f, bias)

    def bias_gradient(self, deltas: Tensor, states: Tensor) -> Tensor | None:
        """Return the rows whose sum is the gradient of the bias, None without a bias."""
        if self.bias is None:
            return None
        along = deltas
        if self.f.threshold:
            # modReLU has derivative 1 along the phase of h.
            along = torch.sgn(states).conj() * deltas
        if along.is_complex() and not self.bias.is_complex():
            return along.real
        return along


class Chunk(NamedTuple):
    """Hold what the adjoint of a chunk reads and writes.

    Attributes:
        sizes: rows of each step.
        grad_states: gradient of the states from outside, or None.
        deltas: where the gradients of z go.
        states: of all steps.
        z: of all steps if f keeps it, or None.
        rounded: where the deltas go in half precision, or None.
        projected: $Y^H h$ of the states before each step, if :meth:`StepLoops.run` wrote it.
    """

    sizes: list[int]
    grad_states: Tensor | None
    deltas: Tensor
    states: Tensor
    z: Tensor | None
    rounded: Tensor | None = None
    projected: Tensor | None = None


class Adjoint(NamedTuple):
    """Hold what the adjoint of a chunk returns, apart from its deltas.

    Attributes:
        carry: gradient of the states before the chunk.
        bias: gradient of the bias, or None.
        transition: gradients of the transition's tensors. None where none is wanted.
    """

    carry: Tensor
    bias: Tensor | None
    transition: tuple[Tensor | None, ...]


class Recovered(NamedTuple):
    """Hold what is recovered of a chunk.

    Attributes:
        z: of all steps.
        before: the states before the first step.
    """

    z: Tensor
    before: Tensor


class StepLoops:
    """Run the three loops over the steps of a chunk.

    Attributes:
        name: identifies them in the arguments of the op ``cwy::rollout``.
        chunk: steps of a chunk whose states are recovered.
        projects: whether :meth:`run` can write $Y^H h$ of a transition in low-rank form.
        in_kernels: whether its own kernels compute everything, whatever torch's flags are.
    """

    name: str
    chunk: int
    projects: bool = False
    in_kernels: bool = False

    def run(
        self,
        cell: Cell,
        sizes: list[int],
        x: Tensor,
        h: Tensor,
        *,
        states: Tensor | None,
        z: Tensor | None,
        rounded: Tensor | None = None,
        projected: Tensor | None = None,
    ) -> Tensor:
        """Run all steps from the states h.

        Args:
            cell: the step.
            sizes: rows of each step.
            x: the inputs of all steps, perhaps in half precision.
            h: the states before.
            states: where the states go, None if they are not wanted.
            z: where z goes, None if it is not wanted.
            rounded: where the states go in half precision, None if they are not wanted.
            projected: where $Y^H h$ of the state before each step goes, None if it is not wanted.

        Returns:
            The last state of each sequence, in memory of its own.
        """
        raise NotImplementedError

    def adjoint(
        self,
        cell: Cell,
        chunk: Chunk,
        *,
        before: Tensor,
        carry: Tensor,
        grad_last: Tensor | None,
    ) -> Adjoint:
        """Write the deltas of all steps.

        Args:
            cell: the step.
            chunk: what is read and written at each step.
            before: the states before the first step.
            carry: gradient that comes from the step after the chunk.
            grad_last: gradient of the last state of each sequence, or None.
        """
        raise NotImplementedError

    def recover(
        self,
        cell: Cell,
        sizes: list[int],
        *,
        x: Tensor,
        h: Tensor,
        hn: Tensor,
        negative: Tensor | None,
    ) -> Recovered:
        """Recover z of all steps from the states after them.

        Args:
            cell: the step.
            sizes: rows of each step.
            x: the inputs of all steps, perhaps in half precision.
            h: the states after the chunk, of the sequences that go on.
            hn: the last state of each sequence.
            negative: whether z is negative, or None if z is the state.
        """
        raise NotImplementedError


LOOPS: dict[str, StepLoops] = {}
"""All step loops by name. An op's arguments are strings and numbers."""


def exactly(loops: StepLoops, device: str) -> AbstractContextManager[None]:
    """Hold off reduced precision on a device type, where torch's products run the steps."""
    if loops.in_kernels:
        return nullcontext()
    return full_precision(device)


def register(loops: StepLoops) -> StepLoops:
    """Make step loops known to the op, and return them."""
    LOOPS[loops.name] = loops
    return loops


class TorchSteps(StepLoops):
    """Run loops of torch's own operations, on a GPU as CUDA graphs."""

    # Exported programs hold this name.
    name = "loops"
    chunk = 64

    def run(
        self,
        cell: Cell,
        sizes: list[int],
        x: Tensor,
        h: Tensor,
        *,
        states: Tensor | None,
        z: Tensor | None,
        rounded: Tensor | None = None,
        projected: Tensor | None = None,
    ) -> Tensor:
        assert projected is None
        x = x.to(h.dtype)
        if states is None and (z is None or rounded is not None):
            states = rows_like(h, sum(sizes))
        if graphs.worth(x, sizes):
            last = _replay_run(cell, sizes, x, h, states, z).clone()
        else:
            last = _run(cell, sizes, x, h, states, z).clone()
        if rounded is not None:
            assert states is not None
            rounded.copy_(states)
        return last

    def adjoint(
        self,
        cell: Cell,
        chunk: Chunk,
        *,
        before: Tensor,
        carry: Tensor,
        grad_last: Tensor | None,
    ) -> Adjoint:
        sizes = chunk.sizes
        if chunk.grad_states is not None:
            chunk = chunk._replace(grad_states=chunk.grad_states.to(chunk.deltas.dtype))
        if graphs.worth(chunk.deltas, sizes):
            carry = _replay_adjoint(cell, chunk, join(carry, grad_last, sizes[0]))
        else:
            carry = _adjoint(cell, chunk, carry, grad_last)
        if chunk.rounded is not None:
            chunk.rounded.copy_(chunk.deltas)
        found = _transition_gradient(cell.transition, chunk, before)
        dbias = cell.bias_gradient(chunk.deltas, chunk.states)
        if dbias is not None:
            assert cell.bias is not None
            dbias = sum_to(dbias, cell.bias.shape)
        return Adjoint(carry, dbias, found)

    def recover(
        self,
        cell: Cell,
        sizes: list[int],
        *,
        x: Tensor,
        h: Tensor,
        hn: Tensor,
        negative: Tensor | None,
    ) -> Recovered:
        recovered = hn.new_empty(sum(sizes), *hn.shape[1:])
        inputs = x.to(hn.dtype).split(sizes)
        values = recovered.split(sizes)
        flips = _split_or_nones(negative, sizes)
        for t in range(len(sizes) - 1, -1, -1):
            known = h.shape[0]
            z = values[t]
            z[:known] = h
            z[known:] = hn[known : sizes[t]]
            flip = flips[t]
            if flip is not None:
                # A state is not negative. Where rounding made it so, or zero, the sign of z must
                # not be lost.
                z.clamp_(min=torch.finfo(z.dtype).tiny)
                z.copy_(torch.where(flip, -z, z))
            rest = z - inputs[t]
            if cell.bias is not None:
                rest -= cell.bias
            h = torch.empty_like(z)
            cell.transition.back(torch.zeros_like(z), rest, h)
        return Recovered(recovered, h)


TORCH = register(TorchSteps())


def _split_or_nones(x: Tensor | None, sizes: list[int]) -> list[Tensor | None]:
    """Return the rows of each step, or None for each step."""
    if x is None:
        return [None] * len(sizes)
    return list(x.split(sizes))


def _part(x: Tensor | None, rows: slice) -> Tensor | None:
    if x is None:
        return None
    return x[rows]


def _run(
    cell: Cell, sizes: list[int], x: Tensor, h: Tensor, states: Tensor | None, z: Tensor | None
) -> Tensor:
    """Run the steps one by one, and return the last states, perhaps as a part of ``states``."""
    f = cell.f
    added = cell.added
    threshold = cell.threshold
    step = cell.transition.fastest_step(h)
    ended = []
    outs = _split_or_nones(states, sizes)
    befores = _split_or_nones(z, sizes)
    for xt, out, before, size in zip(x.split(sizes), outs, befores, sizes, strict=True):
        if size < h.shape[0]:
            ended.append(h[size:])
        into = before
        if into is None:
            into = out
        assert into is not None
        step(xt, h[:size], into)
        if added is not None:
            into += added
        if before is None:
            f.step_(into, threshold)
            h = into
            continue
        h = f.define(before, threshold)
        if out is not None:
            h = out.copy_(h)
    if ended:
        return torch.cat([h, *reversed(ended)])
    return h


def _replay_run(
    cell: Cell, sizes: list[int], x: Tensor, h: Tensor, states: Tensor | None, z: Tensor | None
) -> Tensor:
    """Run the steps in blocks, each by a CUDA graph."""
    batch = sizes[0]
    for start, count in graphs.blocks(len(sizes)):
        rows = slice(start * batch, (start + count) * batch)
        block = [batch] * count
        into: tuple[Tensor | None, ...] = (_part(states, rows),)
        if count not in graphs.BLOCKS:
            h = _run(cell, block, x[rows], h, _part(states, rows), _part(z, rows))
            continue
        if cell.f.keeps_z:
            into = (_part(states, rows), _part(z, rows))
        key = ("run", cell.f, cell.bias is None, cell.transition.setting)
        inputs = (x[rows], h, *cell.constants)
        made, *_ = graphs.replay(_captured_run(cell, block), key, inputs, into)
        h = made[-batch:]
    return h


def _captured_run(cell: Cell, sizes: list[int]) -> Callable[..., tuple[Tensor, ...]]:
    """Return :func:`_run` as a function of tensors only."""

    def call(x: Tensor, h: Tensor, *constants: Tensor) -> tuple[Tensor, ...]:
        inner = cell.with_constants([*constants])
        states = torch.empty_like(x)
        if not cell.f.keeps_z:
            _run(inner, sizes, x, h, states, None)
            return (states,)
        z = torch.empty_like(x)
        _run(inner, sizes, x, h, states, z)
        return states, z

    return call


def join(carry: Tensor, grad_last: Tensor | None, batch: int) -> Tensor:
    """Return the gradient that reaches the last step of each of ``batch`` sequences.

    It is ``carry`` of those that go on after it, and ``grad_last`` of those that end there.
    """
    after = carry.shape[0]
    if after == batch:
        return carry
    if grad_last is None:
        rest = carry.new_zeros(batch - after, *carry.shape[1:])
    else:
        rest = grad_last[after:batch]
    if after:
        return torch.cat([carry, rest])
    return rest


def _adjoint(cell: Cell, chunk: Chunk, carry: Tensor, grad_last: Tensor | None) -> Tensor:
    """Write the deltas, and return the gradient of the states before the chunk."""
    sizes = chunk.sizes
    deltas = chunk.deltas.split(sizes)
    states = chunk.states.split(sizes)
    outside = _split_or_nones(chunk.grad_states, sizes)
    kept = _split_or_nones(chunk.z, sizes)
    threshold = cell.threshold
    step_back = cell.transition.fastest_back(chunk.deltas)
    for t in range(len(sizes) - 1, -1, -1):
        delta = deltas[t]
        if t == len(sizes) - 1 or carry.shape[0] < sizes[t]:
            _arrive(delta, outside[t], carry, grad_last)
        cell.f.back_(delta, states[t], kept[t], threshold)
        if t == 0 or sizes[t - 1] != sizes[t]:
            carry = torch.empty_like(delta)
            step_back(torch.zeros_like(delta), delta, carry)
            continue
        # The step before has as many rows. Its own gradient is added on the way.
        before = outside[t - 1]
        if before is None:
            before = torch.zeros_like(delta)
        carry = deltas[t - 1]
        step_back(before, delta, carry)
    return carry


def _arrive(delta: Tensor, outside: Tensor | None, carry: Tensor, grad_last: Tensor | None) -> None:
    """Write the gradient of the states of a step at which sequences end."""
    after = carry.shape[0]
    if outside is None:
        delta.zero_()
    else:
        delta.copy_(outside)
    delta[:after] += carry
    if grad_last is not None:
        delta[after:] += grad_last[after : delta.shape[0]]


def _replay_adjoint(cell: Cell, chunk: Chunk, carry: Tensor) -> Tensor:
    """Run the adjoint of equal steps in blocks, each by a CUDA graph."""
    batch = chunk.sizes[0]
    for start, count in reversed(list(graphs.blocks(len(chunk.sizes)))):
        rows = slice(start * batch, (start + count) * batch)
        block = Chunk(
            sizes=[batch] * count,
            grad_states=_part(chunk.grad_states, rows),
            deltas=chunk.deltas[rows],
            states=chunk.states[rows],
            z=_part(chunk.z, rows),
        )
        if count not in graphs.BLOCKS:
            carry = _adjoint(cell, block, carry, None)
            continue
        optional = [one for one in (block.z, block.grad_states) if one is not None]
        inputs = (carry, block.states, *cell.constants, *optional)
        what = ("adjoint", cell.f, cell.bias is None, block.grad_states is None)
        key = (*what, cell.transition.setting)
        call = _captured_adjoint(cell, block)
        _, carry = graphs.replay(call, key, inputs, (block.deltas, None))
    return carry


def _captured_adjoint(cell: Cell, block: Chunk) -> Callable[..., tuple[Tensor, ...]]:
    """Return :func:`_adjoint` as a function of tensors only."""
    sizes = block.sizes
    parts = len(cell.constants)
    has_outside = block.grad_states is not None
    has_z = block.z is not None

    def call(carry: Tensor, states: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        optional = [*given[parts:]]
        outside = None
        if has_outside:
            outside = optional.pop()
        z = None
        if has_z:
            z = optional.pop()
        inner = cell.with_constants([*given[:parts]])
        deltas = torch.empty_like(states)
        piece = Chunk(sizes, outside, deltas, states, z)
        return deltas, _adjoint(inner, piece, carry, None)

    return call


def _transition_gradient(q: Transition, chunk: Chunk, before: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the transition's tensors from all steps of a chunk."""
    pairs = _deltas_with_previous(chunk, before)
    parts = [q.grad(delta, earlier) for delta, earlier in pairs]
    found: list[Tensor | None] = []
    for part in zip(*parts, strict=True):
        if part[0] is None:
            found.append(None)
        else:
            found.append(functools.reduce(torch.add, part))
    return tuple(found)


def _deltas_with_previous(chunk: Chunk, before: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield deltas with the states they multiplied, in as few pieces as views allow."""
    first = chunk.sizes[0]
    if first == chunk.sizes[-1]:
        yield chunk.deltas[:first], before
        yield chunk.deltas[first:], chunk.states[:-first]
    else:
        yield chunk.deltas, previous_states(chunk.states, before, chunk.sizes)


def previous_states(states: Tensor, before: Tensor, sizes: list[int]) -> Tensor:
    """Return the state that each row of a chunk came from."""
    rows = zip(states.split(sizes), sizes[1:], strict=False)
    return torch.cat([before, *(state[:size] for state, size in rows)])
