"""The definition: a loop over time, differentiated by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from .._precision import in_full_precision
from .nonlinearities import NONLINEARITIES
from .spec import Activation, Request, RolloutSpec
from .transition import Transition


def why_not(request: Request) -> str | None:
    """Return why autograd can't serve, or None if it can."""
    if request.memory != "store":
        return f"autograd stores every state, and memory is {request.memory!r}"
    return None


def step(
    x: Tensor,
    h: Tensor,
    transition: Transition,
    bias: Tensor | None,
    weight: Tensor | None,
    nonlinearity: Activation,
) -> Tensor:
    """Return the next states."""
    if weight is not None:
        x = transition.map_inputs(x, weight)
    z = transition.multiply(h) + x
    if callable(nonlinearity):
        if bias is not None:
            z = z + bias
        return nonlinearity(z)
    f = NONLINEARITIES[nonlinearity]
    if bias is not None and not f.threshold:
        z = z + bias
    return f.define(z, bias)


@in_full_precision
def rollout(
    x: Tensor,
    h0: Tensor,
    transition: Transition,
    bias: Tensor | None,
    weight: Tensor | None,
    spec: RolloutSpec,
) -> tuple[Tensor, Tensor]:
    """Return the states of every step and each sequence's last state.

    Args:
        x: ``(rows of all steps, ...)``, the inputs, perhaps in half precision.
        h0: ``(B, ...)``, the first states.
        transition: the map of the states.
        bias: added, or the threshold of the nonlinearity, or None.
        weight: maps the inputs, or None.
        spec: how it runs.

    Returns:
        The states like the inputs (none, if only the last are wanted), rounded as the spec wants
        them, and the last states like h0.
    """
    x = x.to(h0.dtype)
    sizes = spec.every_size
    h = h0
    states = []
    ended = []
    for xt, size in zip(x.split(sizes), sizes, strict=True):
        ended.append(h[size:])
        h = step(xt, h[:size], transition, bias, weight, spec.nonlinearity)
        states.append(h)
    hn = h
    if any(rows.shape[0] for rows in ended):
        hn = torch.cat([h, *reversed(ended)])
    if not states or spec.last:
        return h0[:0].clone(), hn
    return torch.cat(states).to(spec.rounded or h0.dtype), hn
