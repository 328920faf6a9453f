"""Recurrences to compare: inputs, and outputs with all gradients."""

import torch

from cwy.ops import WY, cwy_matrix, rollout, wy_factors


def problem(n, batch, steps, dtype=torch.float32, device="cpu", reflections=None):
    """Inputs of a recurrence, made in float64 and rounded, all leaves."""
    g = torch.Generator().manual_seed(n + 31 * batch + steps)
    shapes = {"x": (steps, batch, n), "h0": (batch, n), "v": (n, reflections or n), "bias": (n,)}
    made = {k: torch.randn(*s, dtype=torch.float64, generator=g) for k, s in shapes.items()}
    made["bias"] *= 0.1
    return {k: p.to(dtype).to(device).requires_grad_() for k, p in made.items()}


def run(given, nonlinearity, factors=False, strided=False, order=None, **options):
    """Outputs and all gradients of a loss that reads every state; if wanted, computed with the
    units in another order.
    """
    leaves = {k: p.detach().clone().requires_grad_() for k, p in given.items()}
    x, h0, v, bias = leaves["x"], leaves["h0"], leaves["v"], leaves["bias"]
    if order is not None:
        x, h0, v, bias = x[..., order], h0[..., order], v[order], bias[order]
    transition = wy_factors(v) if factors else cwy_matrix(v)
    if strided:
        x, bias = (torch.stack([part, part], -1)[..., 0] for part in (x, bias))
        h0, *parts = (
            part.mT.contiguous().mT for part in (h0, *(transition if factors else (transition,)))
        )
        transition = WY(*parts) if factors else parts[0]
    states, last = rollout(x, h0, transition, bias, nonlinearity, **options)
    if order is not None:
        states, last = (None if t is None else t[..., order.argsort()] for t in (states, last))
    loss = (
        last * torch.cos(torch.arange(last.numel(), device=last.device)).reshape(last.shape)
    ).sum()
    if states is not None:
        loss = (
            loss
            + (
                states
                * torch.sin(torch.arange(states.numel(), device=last.device)).reshape(states.shape)
            ).sum()
        )
    loss.backward()
    return [t for t in (states, last, *(p.grad for p in leaves.values())) if t is not None]


def double(given):
    return {k: p.detach().double() for k, p in given.items()}
