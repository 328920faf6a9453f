"""Checks of arguments that several functions make."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ._linalg import Axis

DTYPES = tuple(
    jnp.dtype(name)
    for name in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
)
"""The dtypes of arrays that the library takes."""

HALF = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))
"""The dtypes that are computed in float32 and rounded once, at the end."""


def as_array(call: str, name: str, x: Any) -> Array:
    """Return ``x`` as an array, or raise unless its dtype is one that the library computes in."""
    if not isinstance(x, Array | np.ndarray):
        raise TypeError(
            f"{call}: {name} must be a jax.Array or a numpy array, got {type(x).__name__}. "
            "Use jnp.asarray."
        )
    # JAX itself does not take every dtype of numpy, so the dtype is read first.
    if x.dtype not in DTYPES:
        raise TypeError(
            f"{call}: {name} must be floating-point or complex ({_dtype_names()}), got {x.dtype}. "
            "Convert it, e.g. with .astype(jnp.float32)."
        )
    return jnp.asarray(x)


def _dtype_names() -> str:
    return ", ".join(str(dtype) for dtype in DTYPES)


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


def check_dtype(call: str, dtype: Any) -> None:
    """Raise unless an array of this dtype can be made."""
    try:
        right = jnp.dtype(dtype) in DTYPES
    except (TypeError, ValueError):
        right = False
    if not right:
        raise TypeError(f"{call}: dtype must be one of {_dtype_names()}, got {dtype!r}.")


def is_traced(*values: Any) -> bool:
    """Return whether one of the values is not known yet."""
    return any(isinstance(x, jax.core.Tracer) for x in values)


def checked_flag(call: str, name: str, value: Any) -> bool:
    """Return a flag as True or False, or raise if ``jit`` traces it."""
    if is_traced(value):
        raise TypeError(
            f"{call}: {name} must be True or False, got {value}, which jit traces. "
            f"Make it static with static_argnames={name!r}, or bind it with functools.partial "
            "before jit."
        )
    return bool(value)


def as_whole(value: Any) -> int | None:
    """Return a value as an int, or None if it is no whole number or is not known yet."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def checked_whole(call: str, name: str, value: Any, least: int = 0) -> int:
    """Return a whole number, or raise unless it is one and at least so large."""
    found = as_whole(value)
    if found is None or found < least:
        raise ValueError(
            f"{call}: {name} must be a whole number, at least {least}, got {value!r}."
            f"{static_hint(value)}"
        )
    return found


def static_hint(value: Any) -> str:
    """Return what to do about a traced value, or an empty string if it is not traced."""
    if not is_traced(value):
        return ""
    return " It is traced. Make it static, or bind it with functools.partial before jit."


def checked_batch(call: str, batch: Any) -> tuple[int, ...]:
    """Return the dimensions of a batch, or raise unless they are a tuple of whole numbers."""
    try:
        sizes = [as_whole(size) for size in batch]
    except TypeError:
        sizes = [None]
    found = tuple(size for size in sizes if size is not None and size >= 0)
    if len(found) != len(sizes):
        raise ValueError(
            f"{call}: batch must be a tuple of whole numbers, such as (3,), got {batch!r}."
        )
    return found


def check_key(call: str, key: Any) -> None:
    """Raise unless it is one key of ``jax.random``, of the new or of the old kind."""
    if not isinstance(key, Array | np.ndarray):
        raise TypeError(
            f"{call}: key must be a key of jax.random, got {key!r}. Use jax.random.key(seed)."
        )
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        right = key.ndim == 0
    else:
        right = key.ndim == 1 and key.dtype == jnp.uint32
    if not right:
        raise TypeError(
            f"{call}: key must be one key of jax.random, got {key.dtype} of shape {key.shape}. "
            "Use jax.random.key(seed), and batch or jax.vmap to draw several."
        )


def checked_axis(call: str, axis_name: Any) -> Axis:
    """Return a mesh axis, a list of them as a tuple, or raise unless all of them are bound here."""
    if axis_name is None:
        return None
    names = axis_name
    if isinstance(axis_name, str):
        names = (axis_name,)
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{call}: axis_name must be the name of a mesh axis or a tuple of them, "
            f"got {axis_name!r}."
        )
    for name in names:
        _check_bound(call, name)
    return tuple(names)


def _check_bound(call: str, name: str) -> None:
    try:
        lax.axis_size(name)
    except NameError as error:
        raise ValueError(
            f"{call}: axis_name {name!r} is no axis here. Call it inside jax.shard_map, and name "
            "an axis of its mesh."
        ) from error


def checked_signs(
    call: str, signs: Any, shape: tuple[int, ...], *, on_host: bool = False
) -> Array | None:
    """Return signs, or raise unless they are ±1 (complex: of modulus 1) and of this shape.

    Values are read if that needs no transfer, or if ``on_host`` is set. Traced ones are not known.
    """
    if signs is None:
        return None
    given = signs
    signs = as_array(call, "signs", given)
    if signs.shape != shape:
        raise ValueError(
            f"{call}: signs must have one number per column of the matrix, {shape}, "
            f"got {signs.shape}."
        )
    if is_traced(given) or not (on_host or _is_on_host(given)):
        return signs
    values = np.asarray(given)
    off = np.abs(np.abs(values).astype(np.float64) - 1)
    # NaN is not within the tolerance either.
    if not np.all(off <= 8 * float(jnp.finfo(signs.dtype).eps)):
        wrong = values.flat[int(off.argmax())]
        raise ValueError(
            f"{call}: signs must be ±1 (complex: of modulus 1), got {wrong}. Use jnp.sign(signs)."
        )
    return signs


def _is_on_host(x: Array | np.ndarray) -> bool:
    if isinstance(x, np.ndarray):
        return True
    return all(device.platform == "cpu" for device in x.devices())
