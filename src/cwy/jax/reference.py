"""The definition: one reflection after the other, in plain JAX."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from ._blocks import normalize


def reflect(v: Array, x: Array, adjoint: bool = False) -> Array:
    r"""Compute $H(v_1)\cdots H(v_L) X$ with $H(v) = I - 2vv^H/\lVert v\rVert^2$, or its adjoint.

    Args:
        v: ``(*, N, L)``, the vectors as columns.
        x: ``(*, N, K)``.
        adjoint: multiply by the adjoint, in which the order is reversed.
    """
    u = normalize(v).u
    columns = list(range(u.shape[-1]))
    if not adjoint:
        columns.reverse()
    for i in columns:
        ui = u[..., i : i + 1]
        x = x - 2 * ui * jnp.sum(ui.conj() * x, -2, keepdims=True)
    return x
