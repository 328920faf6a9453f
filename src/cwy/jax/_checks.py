"""Checks of arrays and of signs that every function makes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

HALF = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))
"""The dtypes that are computed in float32 and rounded once, at the end."""


def as_array(call: str, name: str, x: Any) -> Array:
    """Return ``x`` as an array, or raise unless its dtype is one that the library computes in."""
    if not isinstance(x, Array | np.ndarray):
        raise TypeError(
            f"{call}: {name} must be a jax.Array or a numpy array, got {type(x).__name__}. "
            "Use jnp.asarray."
        )
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(
            f"{call}: {name} must be floating-point or complex, got {x.dtype}. "
            f"Convert it, e.g. with {name}.astype(jnp.float32)."
        )
    return x


def vectors_of(call: str, v: Any) -> Array:
    """Return reflection vectors ``(*, N, L)``, or raise."""
    v = as_array(call, "v", v)
    if v.ndim < 2:
        raise ValueError(f"{call}: v must have shape (*, N, L), got {v.shape}.")
    return v


def computed_in(dtype: Any) -> jnp.dtype:
    """Return the dtype to compute in: float32 for half precision."""
    dtype = jnp.dtype(dtype)
    if dtype in HALF:
        return jnp.dtype(jnp.float32)
    return dtype


def is_traced(*arrays: Array) -> bool:
    """Return whether values of an array are not known yet."""
    return any(isinstance(x, jax.core.Tracer) for x in arrays)


def checked_signs(call: str, signs: Any, shape: tuple[int, ...]) -> Array | None:
    """Return signs, or raise unless they are ±1 (complex: of modulus 1) and of this shape.

    Values are read only on a CPU and outside of transformations.
    """
    if signs is None:
        return None
    signs = as_array(call, "signs", signs)
    if signs.shape != shape:
        raise ValueError(
            f"{call}: signs must have one number per column of the result, {shape}, "
            f"got {signs.shape}."
        )
    if is_traced(signs) or any(device.platform != "cpu" for device in signs.devices()):
        return signs
    values = np.asarray(signs)
    off = np.abs(np.abs(values).astype(np.float64) - 1)
    if np.any(off > 8 * float(jnp.finfo(signs.dtype).eps)):
        wrong = values.flat[int(off.argmax())]
        raise ValueError(
            f"{call}: signs must be ±1 (complex: of modulus 1), got {wrong}. Use jnp.sign(signs)."
        )
    return signs
