"""A recurrent layer as one node of autograd: the map of its inputs, its transition and all steps.

In parts it has two such functions and six other nodes. For a small layer on a GPU the host takes
longer for them than the kernels run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from ..._torch import plain_apply, saved_tensors_are_packed
from .. import dispatch
from .._precision import autocast_dtype
from ..wy import cwy_matrix
from ..wy.wy import matrix_and_pull_back
from .factors import factors_are_cheaper
from .nonlinearities import Nonlinearity, named
from .rollout import run
from .spec import Request
from .steps import Cell, Chunk, StepLoops, exactly
from .torch import saved_by
from .transition import Formed

_Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""The tensors of :func:`whole_layer`, in its order."""


@dataclass(frozen=True)
class Plan:
    """Hold what follows from shapes, dtypes and the device.

    Attributes:
        loops: who runs the steps.
        f: the nonlinearity.
        sizes: rows of each step.
        mapped: the dtype in which the inputs are mapped. Autocast chooses it.
    """

    loops: StepLoops
    f: Nonlinearity
    sizes: list[int]
    mapped: torch.dtype


def whole_layer(
    x: Tensor,
    h0: Tensor,
    v: Tensor,
    signs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    nonlinearity: str,
) -> tuple[Tensor, Tensor] | None:
    r"""Compute $h_t = f(Q h_{t-1} + W x_t + b)$, where $Q$ is a product of reflections.

    The arguments fit together: a layer has checked them.

    Args:
        x: ``(T, B, K)``, the inputs of every step.
        h0: ``(B, N)``, the first states.
        v: ``(N, L)``, the reflection vectors.
        signs: ``(N,)``, as in :func:`~cwy.ops.cwy_matrix`.
        weight: ``(N, K)``, the input map.
        bias: ``(N,)`` or None.
        nonlinearity: its name.

    Returns:
        The states ``(T, B, N)`` and the last ones ``(B, N)``, or None if the layer must be computed
        in parts. A compiler, a transform, a checkpoint and a call without a gradient need that.
    """
    given = (x, h0, v, signs, weight, bias)
    if not torch.is_grad_enabled() or saved_tensors_are_packed():
        return None
    if not dispatch.is_plain_eager(*given):
        return None
    mapped = autocast_dtype(weight)
    signature: list[Hashable] = [nonlinearity, mapped]
    for tensor in given:
        if tensor is None:
            signature.append(None)
        else:
            signature += (tensor.shape, tensor.dtype, tensor.device)
    key = ("whole layer", *signature)
    call = dispatch.planned(key)
    if call is None:
        call = _find_call(given, nonlinearity, mapped)
        dispatch.keep_plan(key, call)
    return call(*given)


def _in_parts(*given: Tensor | None) -> None:
    """Serve no layer of this signature."""


def _find_call(
    given: _Given, nonlinearity: str, mapped: torch.dtype
) -> Callable[..., tuple[Tensor, Tensor] | None]:
    """Return what computes layers of this signature, or :func:`_in_parts`."""
    x, h0, v, *others = given
    dtype = h0.dtype
    if dtype not in (torch.float32, torch.float64) or x.dtype not in (dtype, mapped):
        return _in_parts
    for tensor in (v, *others):
        if tensor is not None and (tensor.dtype != dtype or tensor.device != x.device):
            return _in_parts
    steps, batch, _ = x.shape
    n, reflections = v.shape
    device = x.device
    if factors_are_cheaper(n, reflections, steps * batch, device.type, dtype, device.index):
        return _in_parts
    request = Request(n, batch, steps, dtype, device.type, nonlinearity, index=device.index)
    module = dispatch.choose("rollout", "auto", request)
    loops = getattr(module, "loops", None)
    if loops is None:
        return _in_parts
    plan = Plan(loops, named(nonlinearity, v), [batch] * steps, mapped)
    return lambda *given: _apply(*given, plan)


class _Layer(Function):
    @staticmethod
    def forward(ctx, x, h0, v, signs, weight, bias, plan):
        found = matrix_and_pull_back(v, signs)
        assert found is not None
        q, back = found
        rows = x.flatten(0, 1).to(plan.mapped)
        factor = weight.to(plan.mapped)
        inputs = linear(rows, factor)
        states = h0.new_empty((*x.shape[:2], h0.shape[1]))
        z = None
        if plan.f.keeps_z:
            z = h0.new_empty((rows.shape[0], h0.shape[1]))
        cell = Cell(Formed(q), plan.f, bias)
        with exactly(plan.loops, h0.device.type):
            last = plan.loops.run(cell, plan.sizes, inputs, h0, states=states.flatten(0, 1), z=z)
        kept = (x, h0, weight, bias, states, z, rows, factor, v, signs, q)
        ctx.save_for_backward(*kept, *back.kept)
        ctx.pull_back = back.function
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return states, last

    @staticmethod
    def backward(ctx, grad_states, grad_last):
        if grad_states is None and grad_last is None:
            return (None,) * 7
        x, h0, weight, bias, states, z, rows, factor, _, _, q, *kept = saved_by(ctx)
        plan = ctx.plan
        if torch.is_grad_enabled() or not dispatch.is_plain_eager(grad_states, grad_last):
            return _differentiate_parts(ctx, grad_states, grad_last)
        deltas = h0.new_empty((rows.shape[0], h0.shape[1]))
        of_inputs = deltas
        rounded = None
        if plan.mapped != h0.dtype:
            of_inputs = rounded = torch.empty_like(deltas, dtype=plan.mapped)
        if grad_states is not None:
            grad_states = grad_states.flatten(0, 1)
        chunk = Chunk(plan.sizes, grad_states, deltas, states.flatten(0, 1), z, rounded)
        cell = Cell(Formed(q), plan.f, bias)
        with exactly(plan.loops, h0.device.type):
            found = plan.loops.adjoint(cell, chunk, before=h0, carry=h0[:0], grad_last=grad_last)
        (dq,) = found.transition
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (of_inputs @ factor).view(x.shape).to(x.dtype)
        dv = None
        if ctx.needs_input_grad[2]:
            dv = ctx.pull_back(dq, *kept)
        dweight = None
        if ctx.needs_input_grad[4]:
            dweight = (of_inputs.mT @ rows).to(weight.dtype)
        return dx, found.carry, dv, None, dweight, found.bias, None


_apply = plain_apply(_Layer)


def _differentiate_parts(
    ctx, grad_states: Tensor | None, grad_last: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Compute the gradients through the layer in parts, which have second derivatives."""
    x, h0, weight, bias, _, _, _, _, v, signs, *_ = saved_by(ctx)
    plan = ctx.plan
    device = x.device.type
    create_graph = torch.is_grad_enabled()
    autocasts = plan.mapped != weight.dtype
    with torch.enable_grad():
        with torch.autocast(device, plan.mapped, enabled=autocasts):
            inputs = linear(x, weight)
        states, last = run(inputs, h0, cwy_matrix(v, signs=signs), bias, plan.f.name)
        results = []
        incoming = []
        for result, gradient in ((cast(Tensor, states), grad_states), (last, grad_last)):
            if gradient is not None:
                results.append(result)
                incoming.append(gradient)
        given = (x, h0, v, signs, weight, bias)
        places = [i for i, needed in enumerate(ctx.needs_input_grad) if needed]
        found = torch.autograd.grad(
            results,
            [given[i] for i in places],
            incoming,
            create_graph=create_graph,
            allow_unused=True,
        )
    gradients: list[Tensor | None] = [None] * 7
    for place, gradient in zip(places, found, strict=True):
        gradients[place] = gradient
    return tuple(gradients)
