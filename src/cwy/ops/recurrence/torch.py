"""The loop and its analytic adjoint, as the op ``cwy::rollout``.

A compiler sees one node and not T of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..._torch import below_autograd, dispatch_mode_count, has_storage, plain_apply
from .._library import define
from .._precision import in_full_precision
from ..dispatch import is_plain_eager
from . import chunks
from .chunks import Gradients, Plan, Results, Saved
from .convolved import gradient_like, rows_like, transition_of
from .nonlinearities import NONLINEARITIES, named
from .spec import Request, RolloutSpec, name_of
from .steps import LOOPS, TORCH, Cell, Chunk, StepLoops, exactly
from .transition import FixedDiagonal, Transition


def why_not(request: Request) -> str | None:
    """Return why the analytic adjoint can't serve, or None if it can."""
    if request.transformed is not None:
        return request.transformed
    if request.nonlinearity not in NONLINEARITIES:
        return "the nonlinearity is a callable, whose derivative only autograd knows"
    return None


def prefers_low_rank(n: int, reflections: int, rows: int) -> bool:
    """Return whether a training step of ``rows`` states takes fewer operations in low-rank form."""
    if torch.compiler.is_compiling():
        # One program serves every length: a choice by the length would be a guard on it. This is
        # the limit of many rows.
        return 16 * reflections < 6 * n
    low_rank = 16 * n * reflections * rows
    formed = 6 * n * n * rows + 12 * n * n * reflections
    return low_rank < formed


loops = TORCH
"""Who runs the steps."""


def rollout(
    x: Tensor,
    h0: Tensor,
    transition: Transition,
    bias: Tensor | None,
    weight: Tensor | None,
    spec: RolloutSpec,
    loops: StepLoops = TORCH,
) -> tuple[Tensor, Tensor]:
    """Return the states of every step and each sequence's last state.

    Args:
        x, h0, transition, bias, weight, spec: as in :func:`.reference.rollout`.
        loops: who runs the steps of a chunk.
    """
    q = transition.tensors
    given = [t for t in (x, h0, bias, weight, *q) if t is not None]
    if spec.memory == "store" and (spec.last or spec.rounded is not None):
        differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in given)
        if not differentiated:
            spec = spec.without_backward()
    if _seen(given):
        results = _forward_op(x, h0, q, bias, weight, **_op_arguments(spec, loops))
    elif _stores_everything(spec, weight):
        results = _apply_stored(x, h0, bias, spec, loops, *q)
    else:
        # An op's call takes apart a list of T sizes, twice, which is longer than a kernel runs.
        results = _Rollout.apply(x, h0, bias, weight, spec, loops, *q)
    return results[0], results[1]


def _stores_everything(spec: RolloutSpec, weight: Tensor | None) -> bool:
    """Return whether one chunk has all steps, all states are returned, and x is mapped already."""
    if spec.memory != "store" or spec.last or weight is not None or not spec.step_count:
        return False
    # Rounded states leave those of full precision to be kept, unless z is.
    return spec.rounded is None or not NONLINEARITIES[name_of(spec.nonlinearity)].keeps_z


def _seen(tensors: list[Tensor]) -> bool:
    """Return whether a compiler, a mode or a kind of tensor must see one op."""
    if torch.compiler.is_compiling() or dispatch_mode_count() > 0:
        return True
    return any(type(t) not in (Tensor, torch.nn.Parameter) for t in tensors)


def _op_arguments(spec: RolloutSpec, loops: StepLoops) -> dict[str, Any]:
    """Return the arguments of the ops that are not tensors."""
    return {
        "nonlinearity": spec.nonlinearity,
        "sizes": spec.sizes,
        "memory": spec.memory,
        "last": spec.last,
        "loops": loops.name,
        "steps": spec.steps,
        "rounded": spec.rounded,
    }


def _planned(
    transition: Transition,
    bias: Tensor | None,
    weight: Tensor | None,
    spec: RolloutSpec,
    loops: StepLoops,
) -> Plan:
    f = named(name_of(spec.nonlinearity), transition.tensors[0])
    cell = Cell(transition, f, bias)
    return Plan(cell, weight, spec.every_size, spec.memory, spec.last, loops, spec.rounded)


@in_full_precision
def _run_forward(
    x: Tensor,
    h0: Tensor,
    q: list[Tensor],
    bias: Tensor | None,
    weight: Tensor | None,
    spec: RolloutSpec,
    loops: StepLoops,
) -> Results:
    return chunks.forward(x, h0, _planned(transition_of(q), bias, weight, spec, loops))


@in_full_precision
def _run_backward(
    h0: Tensor, plan: Plan, saved: Saved, grad_states: Tensor | None, grad_last: Tensor | None
) -> Gradients:
    """Run the adjoint in the precision of ``h0``'s device."""
    return chunks.backward(plan, saved, grad_states, grad_last)


class _Rollout(Function):
    """Differentiate :func:`_run_forward`."""

    @staticmethod
    def forward(ctx, x, h0, bias, weight, spec, loops, *q):
        given = [t for t in (x, h0, bias, weight, *q) if t is not None]
        with below_autograd():
            if _seen(given):
                arguments = _op_arguments(spec, loops)
                results = Results(*_forward_op(x, h0, list(q), bias, weight, **arguments))
            else:
                results = _run_forward(x, h0, list(q), bias, weight, spec, loops)
        # The states stand for x, unless they were not stored or the weight's gradient needs it.
        # No more is kept of the outputs than the adjoint reads: the caller may drop the others, or
        # write to them.
        kept_x = x
        kept_states = kept_hn = h0.new_empty(0, *h0.shape[1:])
        if spec.memory == "store":
            # Rounded states are not read: those of full precision are in ``starts``.
            if spec.rounded is None:
                kept_states = results.states
            if weight is None:
                kept_x = None
        if spec.memory == "reversible":
            kept_hn = results.hn.clone()
        kept = (kept_states, kept_hn, results.kept_z, results.starts)
        ctx.save_for_backward(kept_x, h0, bias, weight, *kept, *q)
        ctx.spec = spec
        ctx.loops = loops
        ctx.x_dtype = x.dtype
        ctx.mark_non_differentiable(results.kept_z, results.starts)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx, grad_states, grad_last, *_):
        x, h0, bias, weight, states, hn, kept_z, starts, *q = saved_by(ctx)
        spec = ctx.spec
        if grad_states is not None and spec.last and not grad_states.shape[0]:
            grad_states = None  # only the last states were wanted
        if grad_states is None and grad_last is None:
            return None, None, None, None, None, None, *(None for _ in q)
        saved = Saved(x, h0, Results(states, hn, kept_z, starts), ctx.x_dtype)
        found = _differentiate(ctx, saved, q, bias, weight, grad_states, grad_last)
        return found.x, found.h0, found.bias, found.weight, None, None, *found.transition


def _differentiate(ctx, saved, q, bias, weight, grad_states, grad_last) -> Gradients:
    """Return the gradients in the way that the caller of the backward pass needs."""
    h0 = saved.h0
    spec = ctx.spec
    grads = [g for g in (grad_states, grad_last) if g is not None]
    batched = not all(has_storage(g) for g in grads)
    if torch.is_grad_enabled() or batched:
        plan = _planned(transition_of(q), bias, weight, spec, ctx.loops)
        return _differentiable_backward(h0, plan, saved, grad_states, grad_last)
    if _seen([*grads, saved.results.states, h0]):
        return _call_backward_op(ctx, saved, q, bias, weight, grad_states, grad_last)
    plan = _planned(_learned(ctx, q), bias, weight, spec, ctx.loops)
    return _run_backward(h0, plan, saved, grad_states, grad_last)


def _learned(ctx, q: list[Tensor]) -> Transition:
    """Return the transition, whose last tensor, a diagonal, may need no gradient."""
    if len(q) > 1 and not ctx.needs_input_grad[-1]:
        return FixedDiagonal(*q)
    return transition_of(q)


class _Stored(Function):
    """Do the same in eager mode, for most calls: one chunk, and every state is stored."""

    @staticmethod
    def forward(ctx, x, h0, bias, spec, loops, *q):
        transition = transition_of(list(q))
        f = named(name_of(spec.nonlinearity), q[0])
        rows = x.shape[0]
        states = rows_like(h0, rows)
        z = None
        if f.keeps_z:
            z = rows_like(h0, rows)
        rounded = None
        if spec.rounded is not None:
            rounded = rows_like(h0, rows, spec.rounded)
        projected = None
        if loops.projects and transition.reflections is not None and any(ctx.needs_input_grad):
            projected = h0.new_empty(rows, transition.reflections)
        with below_autograd(), exactly(loops, h0.device.type):
            last = loops.run(
                Cell(transition, f, bias),
                spec.every_size,
                x,
                h0,
                states=states,
                z=z,
                rounded=rounded,
                projected=projected,
            )
        ctx.save_for_backward(h0, bias, states, z, projected, *q)
        ctx.spec = spec
        ctx.loops = loops
        ctx.x_dtype = x.dtype
        ctx.set_materialize_grads(False)
        if rounded is not None:
            return rounded, last
        return states, last

    @staticmethod
    def backward(ctx, grad_states, grad_last):
        h0, bias, states, z, projected, *q = saved_by(ctx)
        if grad_states is None and grad_last is None:
            return None, None, None, None, None, *(None for _ in q)
        if torch.is_grad_enabled() or not is_plain_eager(grad_states, grad_last):
            none = h0.new_empty(0, *h0.shape[1:])
            results = Results(states, none, none, none)
            if ctx.spec.rounded is not None:
                results = results._replace(states=none, starts=states)
            if z is not None:
                results = results._replace(kept_z=z)
            saved = Saved(None, h0, results, ctx.x_dtype)
            found = _differentiate(ctx, saved, q, bias, None, grad_states, grad_last)
            return found.x, found.h0, found.bias, None, None, *found.transition
        f = named(name_of(ctx.spec.nonlinearity), q[0])
        cell = Cell(_learned(ctx, q), f, bias)
        deltas = rows_like(h0, states.shape[0])
        dx = deltas
        rounded = None
        if ctx.x_dtype != h0.dtype:
            dx = rounded = rows_like(h0, states.shape[0], ctx.x_dtype)
        chunk = Chunk(ctx.spec.every_size, grad_states, deltas, states, z, rounded, projected)
        with exactly(ctx.loops, h0.device.type):
            found = ctx.loops.adjoint(cell, chunk, before=h0, carry=h0[:0], grad_last=grad_last)
        return dx, found.carry, found.bias, None, None, *found.transition


_apply_stored = plain_apply(_Stored)


def _call_backward_op(ctx, saved, q, bias, weight, grad_states, grad_last) -> Gradients:
    dx, dh0, dbias, dweight, *dq = _backward_op(
        grad_states,
        grad_last,
        saved.x,
        saved.h0,
        q,
        bias,
        weight,
        **saved.results._asdict(),
        **_op_arguments(ctx.spec, ctx.loops),
        x_dtype=saved.x_dtype,
    )
    if bias is None:
        dbias = None
    if weight is None:
        dweight = None
    return Gradients(dx, dh0, dq, dbias, dweight)


def saved_by(ctx) -> tuple[Any, ...]:
    """Return what the forward pass saved. Explain it if a caller wrote to its output since."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        raise RuntimeError(
            "rollout: the backward pass reads the output of the forward pass, which was modified "
            "by an inplace operation. Write y = 2 * y for y.mul_(2), or change a copy, y.clone(). "
            "A layer with memory='checkpoint' keeps no output."
        ) from error


@in_full_precision
def _differentiable_backward(
    h0: Tensor, plan: Plan, saved: Saved, grad_states: Tensor | None, grad_last: Tensor | None
) -> Gradients:
    """Run the adjoint out of place, from stored states.

    It can be differentiated again, or take a batch of gradients.
    """
    states = saved.states(plan)
    if plan.memory != "store" or not states.shape[0]:
        raise ValueError(
            "rollout: a second derivative, or a batch of gradients at once, needs memory='store' "
            "and, for abs and complex modrelu, output='all'."
        )
    transition = plan.cell.transition
    delta, carry = _differentiable_deltas(plan, saved, grad_states, grad_last)
    sizes = plan.sizes
    rows = zip(states.split(sizes), sizes[1:], strict=False)
    before = torch.cat([h0[: sizes[0]], *(state[:size] for state, size in rows)])
    dbias = plan.cell.bias_gradient(delta, states)
    if dbias is not None:
        assert plan.cell.bias is not None
        dbias = dbias.sum_to_size(plan.cell.bias.shape)
    dx = delta
    dweight = None
    if plan.weight is not None:
        assert saved.x is not None
        inputs = saved.x.to(delta.dtype)
        dx, dweight = transition.map_inputs_back(delta, inputs, plan.weight)
    dx = dx.to(saved.x_dtype)
    return Gradients(dx, carry, list(transition.grad(delta, before)), dbias, dweight)


def _differentiable_deltas(
    plan: Plan, saved: Saved, grad_states: Tensor | None, grad_last: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the deltas of all steps, and the gradient of the first states."""
    cell = plan.cell
    h0 = saved.h0
    sizes = plan.sizes
    states = saved.states(plan).split(sizes)
    z: list[Tensor | None] = [None] * len(sizes)
    if cell.f.keeps_z:
        z = list(saved.results.kept_z.split(sizes))
    if grad_states is None:
        outside = [torch.zeros_like(state) for state in states]
    else:
        outside = grad_states.to(h0.dtype).split(sizes)
    carry = torch.zeros_like(h0[:0])
    deltas = []
    for t in range(len(sizes) - 1, -1, -1):
        after = carry.shape[0]
        if grad_last is None:
            ending = h0.new_zeros(sizes[t] - after, *h0.shape[1:])
        else:
            ending = grad_last[after : sizes[t]]
        arrived = outside[t] + torch.cat([carry, ending])
        delta = cell.f.back(arrived, states[t], z[t], cell.threshold)
        carry = cell.transition.multiply_adjoint(delta)
        deltas.append(delta)
    return torch.cat(deltas[::-1]), carry


def _forward(
    x, h0, q, bias, weight, *, nonlinearity, sizes, memory, last, loops, steps=None, rounded=None
) -> Results:
    spec = RolloutSpec(nonlinearity, sizes, steps, memory, last, rounded)
    return _run_forward(x, h0, q, bias, weight, spec, LOOPS[loops])


def _forward_autograd(
    x, h0, q, bias, weight, *, nonlinearity, sizes, memory, last, loops, steps=None, rounded=None
):
    spec = RolloutSpec(nonlinearity, sizes, steps, memory, last, rounded)
    return _Rollout.apply(x, h0, bias, weight, spec, LOOPS[loops], *q)


def _forward_fake(
    x, h0, q, bias, weight, *, nonlinearity, sizes, memory, last, loops, steps=None, rounded=None
) -> Results:
    spec = RolloutSpec(nonlinearity, sizes, steps, memory, last, rounded)
    f = named(nonlinearity, q[0])
    rows = x.shape[0]
    chunk = chunks.chunk_size(spec.step_count, memory, LOOPS[loops])
    kept = 0
    if chunks.keeps_states(f, memory, last, rounded):
        kept = rows
    states = rows_like(h0, kept)
    kept_z = torch.empty(0, dtype=torch.uint8, device=x.device)
    if f.keeps_z and memory == "store":
        kept_z = rows_like(h0, rows)
    elif f.keeps_z and memory == "reversible":
        size = _sign_bytes(spec, chunk, h0.shape[1:].numel())
        kept_z = torch.empty(size, dtype=torch.uint8, device=x.device)
    starts = rows_like(h0, 0)
    if memory == "checkpoint":
        starts = rows_like(h0, _start_rows(spec, chunk))
    if rounded is not None:
        if memory == "store":
            starts = states
        returned = rows
        if last:
            returned = 0
        states = rows_like(h0, returned, rounded)
    return Results(states, torch.empty_like(h0), kept_z, starts)


def _sign_bytes(spec: RolloutSpec, chunk: int, units: int) -> int:
    """Return how many bytes the sign bits of z take: whole bytes per chunk."""
    sizes = spec.sizes
    if spec.steps is None:
        rows = [sum(sizes[start : start + chunk]) for start in range(0, len(sizes), max(chunk, 1))]
        return sum(-(-size * units // 8) for size in rows)
    whole = spec.steps // chunk
    rest = spec.steps % chunk
    return whole * -(-chunk * sizes[0] * units // 8) + -(-rest * sizes[0] * units // 8)


def _start_rows(spec: RolloutSpec, chunk: int) -> int:
    """Return how many rows the first steps of all chunks have."""
    if spec.steps is None:
        return sum(spec.sizes[:: max(chunk, 1)])
    return -(-spec.steps // chunk) * spec.sizes[0]


def _backward(
    grad_states,
    grad_last,
    x,
    h0,
    q,
    bias,
    weight,
    states,
    *,
    hn,
    kept_z,
    starts,
    nonlinearity,
    sizes,
    memory,
    last,
    loops,
    steps=None,
    rounded=None,
    x_dtype=None,
) -> list[Tensor | None]:
    spec = RolloutSpec(nonlinearity, sizes, steps, memory, last, rounded)
    plan = _planned(transition_of(q), bias, weight, spec, LOOPS[loops])
    saved = Saved(x, h0, Results(states, hn, kept_z, starts), x_dtype or h0.dtype)
    found = _run_backward(h0, plan, saved, grad_states, grad_last)
    constants = [_or_empty(found.bias, h0), _or_empty(found.weight, h0)]
    return [found.x, found.h0, *constants, *found.transition]


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    """Return the tensor, or an empty one: an op returns no None in a list."""
    if x is None:
        return like.new_empty(0)
    return x


def _backward_fake(
    grad_states,
    grad_last,
    x,
    h0,
    q,
    bias,
    weight,
    states,
    *,
    hn,
    kept_z,
    starts,
    nonlinearity,
    sizes,
    memory,
    last,
    loops,
    steps=None,
    rounded=None,
    x_dtype=None,
) -> list[Tensor | None]:
    spec = RolloutSpec(nonlinearity, sizes, steps, memory, last, rounded)
    like = h0
    if weight is not None:
        like = x
    constants = [_or_empty(_gradient_like(one), h0) for one in (bias, weight)]
    dq = [gradient_like(one) for one in q]
    dx = rows_like(like, spec.row_count, x_dtype or h0.dtype)
    return [dx, torch.empty_like(h0), *constants, *dq]


def _gradient_like(x: Tensor | None) -> Tensor | None:
    """Return memory for the gradient of a constant, None if there is no constant."""
    if x is None:
        return None
    return gradient_like(x)


_TENSORS = "Tensor h0, Tensor[] q, Tensor? bias, Tensor? weight"
_RESULTS = "Tensor states, *, Tensor hn, Tensor kept_z, Tensor starts"
_SPEC = (
    "str nonlinearity, SymInt[] sizes, str memory, bool last, str loops, "
    "SymInt? steps=None, ScalarType? rounded=None"
)
_forward_op = define(
    f"rollout(Tensor x, {_TENSORS}, *, {_SPEC}) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    _forward_autograd,
)
_backward_op = define(
    "rollout_backward(Tensor? grad_states, Tensor? grad_last, Tensor? x, "
    f"{_TENSORS}, {_RESULTS}, {_SPEC}, ScalarType? x_dtype=None) -> Tensor[]",
    _backward,
    _backward_fake,
)
