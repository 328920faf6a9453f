"""The loops over the steps of a chunk: forward, adjoint, and backwards from the last state.

Tensors over time are flat; step t has the ``sizes[t]`` rows after those of the steps before it. ``z`` is None unless f has
to keep it beside the states; ``bias`` is added to z, or f's threshold.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from . import graphs
from .nonlinearities import Nonlinearity
from .transition import Transition, back, forth, of, rows_like, summed_to

CHUNK = 64  # steps at once, where memory is short


def run(
    x: Tensor, h: Tensor, states: Tensor | None, z: Tensor | None, sizes: list[int], q: Transition, f: Nonlinearity,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Writes the states and z of all steps, where they are wanted, from the states before; returns each last one, anew."""
    if states is None and z is None:
        states = rows_like(h, sum(sizes))
    if not graphs.worth(x, sizes):
        return _run(x, h, states, z, sizes, q, f, bias).clone()
    batch, parts = sizes[0], len(q)
    for start, count in graphs.blocks(len(sizes)):
        rows, block = slice(start * batch, (start + count) * batch), [batch] * count
        into, before = None if states is None else states[rows], None if z is None else z[rows]
        if count not in graphs.BLOCKS:
            h = _run(x[rows], h, into, before, block, q, f, bias)
            continue

        def record(x: Tensor, h: Tensor, *rest: Tensor, block=block) -> tuple[Tensor, ...]:
            made, kept = torch.empty_like(x), torch.empty_like(x) if f.keeps_z else None
            _run(
                x,
                h,
                made,
                kept,
                block,
                of([*rest[:parts]]),
                f,
                rest[parts] if len(rest) > parts else None,
            )
            return (made,) if kept is None else (made, kept)

        given = x[rows], h, *q, *([] if bias is None else [bias])
        made, *_ = graphs.replay(
            record, ("run", f, bias is None), given, (into, before) if f.keeps_z else (into,)
        )
        h = made[-batch:]
    return h.clone()


def _run(x, h, states, z, sizes, q, f, bias):
    none = [None] * len(sizes)
    outs, befores = (
        none if states is None else states.split(sizes),
        none if z is None else z.split(sizes),
    )
    added, threshold = (None, bias) if f.threshold else (bias, None)
    ended, step = [], forth(q, h)
    for xt, out, before, size in zip(x.split(sizes), outs, befores, sizes, strict=True):
        into = out if before is None else before
        if size < h.shape[0]:
            ended.append(h[size:])
        step(xt, h[:size], into)
        if added is not None:
            into += added
        if before is None:
            f.step_(into, threshold)
            h = into
        else:
            h = (
                f.define(before, threshold)
                if out is None
                else out.copy_(f.define(before, threshold))
            )
    return torch.cat([h, *reversed(ended)]) if ended else h


def adjoint(
    g: Tensor | None, carry: Tensor, gn: Tensor | None, deltas: Tensor, states: Tensor, before: Tensor, z: Tensor | None,
    sizes: list[int], q: Transition, f: Nonlinearity, bias: Tensor | None,
) -> tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]:  # fmt: skip
    """Writes the deltas of all steps; returns the gradients of the states ``before`` them, the bias and the transition.

    ``g`` is the gradient of the states from outside, ``carry`` what comes from the step after, ``gn`` the gradient of the
    last state of each sequence.
    """
    carry = (_replay if graphs.worth(deltas, sizes) else _adjoint)(
        g, carry, gn, deltas, states, z, sizes, q, f, bias
    )
    found = _gradient(q, deltas, states, before, sizes)
    if bias is None:
        return carry, None, found
    # Along the phase of h, modReLU has derivative 1: its threshold's gradient is that of |z|.
    along = (torch.sgn(states).conj() * deltas) if f.threshold else deltas
    return (
        carry,
        summed_to(
            along.real if along.is_complex() and not bias.is_complex() else along, bias.shape
        ),
        found,
    )


def ending(carry: Tensor, gn: Tensor | None, batch: int) -> Tensor:
    """What reaches the last step of each of ``batch`` sequences: ``carry`` from the step after, or it ends here."""
    after = carry.shape[0]
    if after == batch:
        return carry
    rest = carry.new_zeros(batch - after, *carry.shape[1:]) if gn is None else gn[after:batch]
    return torch.cat([carry, rest]) if after else rest


def _replay(g, carry, gn, deltas, states, z, sizes, q, f, bias):
    batch, parts = sizes[0], len(q)
    carry = ending(carry, gn, batch)
    for start, count in reversed(list(graphs.blocks(len(sizes)))):
        rows, block = slice(start * batch, (start + count) * batch), [batch] * count
        outside, kept = None if g is None else g[rows], None if z is None else z[rows]
        if count not in graphs.BLOCKS:
            carry = _adjoint(
                outside, carry, None, deltas[rows], states[rows], kept, block, q, f, bias
            )
            continue

        def record(carry: Tensor, states: Tensor, *rest: Tensor, block=block) -> tuple[Tensor, ...]:
            made, extra = torch.empty_like(states), [*rest[parts:]]
            outside = extra.pop() if g is not None else None
            kept = extra.pop() if f.keeps_z else None
            threshold = extra.pop() if extra else None
            return made, _adjoint(
                outside, carry, None, made, states, kept, block, of([*rest[:parts]]), f, threshold
            )

        extra = [
            *([] if bias is None else [bias]),
            *([] if kept is None else [kept]),
            *([] if outside is None else [outside]),
        ]
        key = "adjoint", f, bias is None, g is None
        _, carry = graphs.replay(
            record, key, (carry, states[rows], *q, *extra), (deltas[rows], None)
        )
    return carry


def _adjoint(g, carry, gn, deltas, states, z, sizes, q, f, bias):
    steps, values = deltas.split(sizes), states.split(sizes)
    outside = None if g is None else g.split(sizes)
    kept = [None] * len(sizes) if z is None else z.split(sizes)
    threshold, step_back = bias if f.threshold else None, back(q, deltas)
    for t in range(len(sizes) - 1, -1, -1):
        delta, after = steps[t], carry.shape[0]
        if t == len(sizes) - 1 or after < sizes[t]:
            delta.zero_() if outside is None else delta.copy_(outside[t])
            delta[:after] += carry
            if gn is not None:
                delta[after:] += gn[after : sizes[t]]
        f.back_(delta, values[t], kept[t], threshold)
        # Where the step before has as many rows, its own gradient is added on the way.
        if t and sizes[t - 1] == sizes[t]:
            before = torch.zeros_like(delta) if outside is None else outside[t - 1]
            step_back(before, delta, steps[t - 1])
            carry = steps[t - 1]
        else:
            carry = torch.empty_like(delta)
            step_back(torch.zeros_like(delta), delta, carry)
    return carry


def recover(
    x: Tensor,
    h: Tensor,
    hn: Tensor,
    negative: Tensor | None,
    sizes: list[int],
    q: Transition,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """z of all steps from the state after them, and the state before; ``hn`` has those of sequences that end here."""
    recovered = hn.new_empty(sum(sizes), *hn.shape[1:])
    inputs, values = x.split(sizes), recovered.split(sizes)
    flips = None if negative is None else negative.split(sizes)
    for t in range(len(sizes) - 1, -1, -1):
        known = h.shape[0]
        z = values[t]
        z[:known] = h
        z[known:] = hn[known : sizes[t]]
        if flips is not None:
            # A state is not negative; where rounding made it so, or zero, the sign of z must not be lost.
            z.clamp_(min=torch.finfo(z.dtype).tiny)
            z.copy_(torch.where(flips[t], -z, z))
        rest = z - inputs[t]
        if bias is not None:
            rest -= bias
        h = torch.empty_like(z)
        q.back(torch.zeros_like(z), rest, h)
    return recovered, h


def _gradient(
    q: Transition, deltas: Tensor, states: Tensor, before: Tensor, sizes: list[int]
) -> tuple[Tensor | None, ...]:
    """The gradient of the transition's tensors from all steps of a chunk, whose first has the states ``before``."""
    parts = [
        q.grad(ours, previous) for ours, previous in _steps_before(deltas, states, before, sizes)
    ]
    return tuple(
        None if part[0] is None else functools.reduce(torch.add, part)
        for part in zip(*parts, strict=True)
    )


def _steps_before(
    deltas: Tensor, states: Tensor, before: Tensor, sizes: list[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Deltas beside the states they multiplied, in as few pieces as views allow."""
    if sizes[0] == sizes[-1]:
        yield deltas[: sizes[0]], before
        yield deltas[sizes[0] :], states[: -sizes[0]]
    else:
        yield deltas, previous(states, before, sizes)


def previous(states: Tensor, before: Tensor, sizes: list[int]) -> Tensor:
    """The state that each row of a chunk came from."""
    if sizes[0] == sizes[-1]:
        return torch.cat([before, states[: -sizes[0]]])
    return torch.cat(
        [
            before,
            *(value[:size] for value, size in zip(states.split(sizes), sizes[1:], strict=False)),
        ]
    )
