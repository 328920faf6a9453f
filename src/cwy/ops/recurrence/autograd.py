"""The loop written by hand, as the op ``cwy::rollout``: a compiler sees one node and not T of them."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import conv_transpose2d

from ..._torch import below_autograd, dispatch_mode_count, has_storage
from .._library import define
from .._precision import in_full_precision
from . import bptt
from .bptt import Rollout
from .nonlinearities import named
from .transition import Signed, half, mapped_back, of, rows_like


def rollout(
    x: Tensor, h0: Tensor, q: list[Tensor], bias: Tensor | None, weight: Tensor | None, nonlinearity: str, sizes: list[int],
    memory: str, last: bool, steps: int | None = None, loops: str = "loops",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the states of every step (empty, if only the last is wanted) and the last state of each sequence.

    ``steps``, if given, is the number of steps, and ``sizes`` has the rows of one, as each has as many.
    ``loops`` names the module in this folder whose loops run.
    """
    given = [t for t in (x, h0, bias, weight, *q) if t is not None]
    if (
        last
        and memory == "store"
        and not (torch.is_grad_enabled() and any(t.requires_grad for t in given))
    ):
        memory = "nothing"
    how = nonlinearity, sizes, memory, last, loops, steps
    if _seen(given):
        states, hn, _, _ = _forward_op(x, h0, q, bias, weight, *how)
    else:
        # An op's call takes apart a list of T sizes, twice, which is longer than a kernel runs.
        states, hn, _, _ = _Rollout.apply(x, h0, bias, weight, how, *q)
    return states, hn


def _seen(tensors: list[Tensor]) -> bool:
    """Whether a compiler, a mode or a kind of tensor looks at what is called, and must see one op."""
    looking = torch.compiler.is_compiling() or dispatch_mode_count() > 0
    return looking or any(type(t) not in (Tensor, torch.nn.Parameter) for t in tensors)


def _plan(q, bias, weight, nonlinearity, sizes, memory, last, loops, steps=None) -> Rollout:
    listed = _listed(sizes, steps)
    return Rollout(
        of(q), bias, weight, named(nonlinearity, q[0]), listed, memory, last, _module(loops)
    )


def _listed(sizes: list[int], steps: int | None) -> list[int]:
    """Return the rows of every step."""
    return sizes if steps is None else sizes * steps


@functools.cache
def _module(loops: str) -> ModuleType:
    return importlib.import_module(f".{loops}", __package__)


@in_full_precision
def _forward(x, h0, q, bias, weight, *how):
    return bptt.forward(x, h0, _plan(q, bias, weight, *how))


def _forward_fake(x, h0, q, bias, weight, nonlinearity, sizes, memory, last, loops, steps=None):
    f, rows = named(nonlinearity, q[0]), x.shape[0]
    kept = rows if bptt.keeps_states(f, memory, last) else 0
    chunk = bptt.chunk_size(len(sizes) if steps is None else steps, memory, _module(loops))
    signs = torch.empty(0, dtype=torch.uint8, device=x.device)
    if f.keeps_z and memory == "store":
        signs = rows_like(h0, rows)
    elif f.keeps_z and memory == "reversible":
        size = _sign_bytes(sizes, steps, chunk, h0.shape[1:].numel())
        signs = torch.empty(size, dtype=torch.uint8, device=x.device)
    starts = _start_rows(sizes, steps, chunk) if memory == "checkpoint" else 0
    return rows_like(h0, kept), torch.empty_like(h0), signs, rows_like(h0, starts)


def _sign_bytes(sizes: list[int], steps: int | None, chunk: int, units: int) -> int:
    """Return how many bytes the signs of all chunks take: eight signs a byte, each chunk in whole bytes."""
    if steps is None:
        rows = [sum(sizes[start : start + chunk]) for start in range(0, len(sizes), max(chunk, 1))]
        return sum(-(-size * units // 8) for size in rows)
    whole, rest = steps // chunk, steps % chunk
    return whole * -(-chunk * sizes[0] * units // 8) + -(-rest * sizes[0] * units // 8)


def _start_rows(sizes: list[int], steps: int | None, chunk: int) -> int:
    """Return how many rows the first steps of all chunks have."""
    if steps is None:
        return sum(sizes[:: max(chunk, 1)])
    return -(-steps // chunk) * sizes[0]


@in_full_precision
def _backward(g, gn, x, h0, q, bias, weight, states, hn, signs, starts, *how, signed=False):
    """If ``signed``, the diagonal of a factored transition gets no gradient."""
    plan = _plan(q, bias, weight, *how)
    plan = plan._replace(transition=Signed(*q)) if signed else plan
    dx, dh0, dq, dbias, dweight = bptt.backward(g, gn, x, h0, plan, states, hn, signs, starts)
    empty = h0.new_empty(0)
    return [dx, dh0, empty if dbias is None else dbias, empty if dweight is None else dweight, *dq]


def _backward_fake(
    g,
    gn,
    x,
    h0,
    q,
    bias,
    weight,
    states,
    hn,
    signs,
    starts,
    nonlinearity,
    sizes,
    memory,
    last,
    loops,
    steps=None,
):
    empty = h0.new_empty(0)
    dx = rows_like(h0 if weight is None else x, sum(sizes) if steps is None else sizes[0] * steps)
    like = lambda p: (
        torch.empty_like(p) if p.dim() == 4 else p.new_empty(p.shape)
    )  # products are laid out row by row
    return [
        dx,
        torch.empty_like(h0),
        *(empty if p is None else like(p) for p in (bias, weight)),
        *map(like, q),
    ]


class _Rollout(Function):
    @staticmethod
    def forward(ctx, x, h0, bias, weight, how, *q):
        given = [t for t in (x, h0, bias, weight, *q) if t is not None]
        with below_autograd():
            forward = _forward_op if _seen(given) else _forward
            states, hn, signs, starts = forward(x, h0, list(q), bias, weight, *how)
        # The states stand for x, unless they were not stored or the input map's gradient needs it. Of the outputs no more is
        # kept than the adjoint reads: the caller may drop the others, or write to them.
        need_x, none = how[2] != "store" or weight is not None, h0.new_empty(0, *h0.shape[1:])
        kept = states if how[2] == "store" else none, hn.clone() if how[2] == "reversible" else none
        ctx.save_for_backward(x if need_x else None, h0, bias, weight, *kept, signs, starts, *q)
        ctx.how = how
        ctx.mark_non_differentiable(signs, starts)
        ctx.set_materialize_grads(False)
        return states, hn, signs, starts

    @staticmethod
    def backward(ctx, g, gn, *_):
        x, h0, bias, weight, states, hn, signs, starts, *q = _saved(ctx)
        if g is not None and ctx.how[3] and not g.shape[0]:
            g = None  # only the last states were wanted
        if g is None and gn is None:
            return None, None, None, None, None, *(None for _ in q)
        batched = not all(has_storage(t) for t in (g, gn) if t is not None)
        if torch.is_grad_enabled() or batched:
            dx, dh0, dq, dbias, dweight = _differentiable_backward(
                g, gn, x, h0, q, bias, weight, states, signs, ctx.how
            )
        else:
            given = [t for t in (g, gn, states, h0) if t is not None]
            signed = len(q) > 1 and not ctx.needs_input_grad[-1]
            backward = _backward_op if _seen(given) else functools.partial(_backward, signed=signed)
            dx, dh0, dbias, dweight, *dq = backward(
                g, gn, x, h0, q, bias, weight, states, hn, signs, starts, *ctx.how
            )
        return (
            dx,
            dh0,
            None if bias is None else dbias,
            None if weight is None else dweight,
            None,
            *dq,
        )


def _saved(ctx) -> tuple[Tensor | None, ...]:
    """Return what the forward pass saved; if a caller wrote to its output since, explain that."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        raise RuntimeError(
            "rollout: the backward pass reads the output of the forward pass, which was modified by an inplace operation. "
            "Write y = 2 * y for y.mul_(2), or change a copy, y.clone(). A layer with memory='checkpoint' keeps no output."
        ) from error


@in_full_precision
def _differentiable_backward(g, gn, x, h0, q, bias, weight, states, signs, how):
    """The adjoint out of place, so that it can be differentiated again, or take a batch of gradients; it reads the states."""
    nonlinearity, sizes, memory, *_, steps = how
    sizes = _listed(sizes, steps)
    if memory != "store" or not states.shape[0]:
        raise ValueError(
            "rollout: a second derivative, or a batch of gradients at once, needs memory='store' and, for abs and complex "
            "modrelu, output='all'."
        )
    f, values = named(nonlinearity, h0), states.split(sizes)
    z = signs.split(sizes) if f.keeps_z else [None] * len(sizes)
    grads = [torch.zeros_like(v) for v in values] if g is None else g.split(sizes)
    carry, deltas = torch.zeros_like(h0[:0]), []
    for t in range(len(sizes) - 1, -1, -1):
        after = carry.shape[0]
        ending = (
            h0.new_zeros(sizes[t] - after, *h0.shape[1:]) if gn is None else gn[after : sizes[t]]
        )
        delta = f.back(
            grads[t] + torch.cat([carry, ending]), values[t], z[t], bias if f.threshold else None
        )
        carry = multiply_adjoint(q, delta)
        deltas.append(delta)
    delta = torch.cat(deltas[::-1])
    before = torch.cat(
        [h0[: sizes[0]], *(v[:size] for v, size in zip(values, sizes[1:], strict=False))]
    )
    along = torch.sgn(states).conj() * delta if f.threshold else delta
    dbias = (
        None
        if bias is None
        else (along.real if along.is_complex() and not bias.is_complex() else along).sum_to_size(
            bias.shape
        )
    )
    dx, dweight = (delta, None) if weight is None else mapped_back(delta, x, weight)
    return dx, carry, of(q).grad(delta, before), dbias, dweight


def multiply_adjoint(q, delta):
    if len(q) == 1:
        return (
            delta @ q[0].conj()
            if q[0].dim() == 2
            else conv_transpose2d(delta, q[0], padding=half(q[0]))
        )
    w, y, d = q
    return delta * d.conj() - (delta @ w.conj()) @ y.mT


_HOW = "str nonlinearity, SymInt[] sizes, str memory, bool last, str loops, SymInt? steps=None"
_forward_op = define(
    f"rollout(Tensor x, Tensor h0, Tensor[] q, Tensor? bias, Tensor? weight, {_HOW}) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    lambda x, h0, q, bias, weight, *how: _Rollout.apply(x, h0, bias, weight, how, *q),
)
_backward_op = define(
    "rollout_backward(Tensor? g, Tensor? gn, Tensor? x, Tensor h0, Tensor[] q, Tensor? bias, Tensor? weight, "
    f"Tensor states, Tensor hn, Tensor signs, Tensor starts, {_HOW}) -> Tensor[]",
    _backward,
    _backward_fake,
)
