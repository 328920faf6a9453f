"""The definition: one reflection after the other, in plain JAX."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ._blocks import normalize


def reflect(v: Array, x: Array, adjoint: bool = False) -> Array:
    r"""Compute $H(v_1)\cdots H(v_L) X$ with $H(v) = I - 2vv^H/\lVert v\rVert^2$, or its adjoint.

    Args:
        v: ``(*, N, L)``, the vectors as columns.
        x: ``(*, N, K)``.
        adjoint: multiply by the adjoint, in which the order is reversed.
    """
    columns = jnp.moveaxis(normalize(v).u, -1, 0)

    def step(x: Array, u: Array) -> tuple[Array, None]:
        u = u[..., None]
        return x - 2 * u * jnp.sum(u.conj() * x, -2, keepdims=True), None

    return lax.scan(step, x, columns, reverse=not adjoint)[0]
