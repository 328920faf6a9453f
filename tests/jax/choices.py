"""Time the choices that ``cwy.jax`` makes, on this device: ``python -m tests.jax.choices N``.

Columns of a block and ways to invert for Q of N x N, and the unrolling of a recurrence.
"""

import os
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

from cwy.jax import _blocks, _linalg, cwy_matrix, init, rollout, wy


def milliseconds(call, *given):
    """Return what compiling took, in seconds, and the least of 10 calls."""
    begin = time.perf_counter()
    jax.block_until_ready(call(*given))
    first = time.perf_counter() - begin
    least = float("inf")
    for _ in range(10):
        begin = time.perf_counter()
        jax.block_until_ready(call(*given))
        least = min(least, time.perf_counter() - begin)
    return f"{least * 1e3:9.3f} ms, first call {first:5.1f} s"


def matrices(n):
    v = jax.random.normal(jax.random.key(0), (n, n))
    for way in ("products", "solve"):
        for columns, most in ((64, 32), (128, 32), (256, 16)):
            _blocks.COLUMNS = columns
            _blocks.MOST_BLOCKS = most
            _blocks.triangular_inverse = lambda s, way=way: _linalg.triangular_inverse(s, way)
            form = lambda v: wy._first_columns(v, n)
            both = jax.jit(lambda v, z, form=form: jax.vjp(form, v)[1](z))
            print(n, way, columns, most, milliseconds(both, v, v), flush=True)


def recurrences(n=190, batch=128, steps=1020):
    x = 0.1 * jax.random.normal(jax.random.key(0), (steps, batch, n))
    h0 = jnp.ones((batch, n))
    bias = jnp.zeros(n)
    q = cwy_matrix(init.random(jax.random.key(1), n))
    for forward_mode, unroll in ((True, 1), (False, 1), (False, 4), (False, 8), (False, 20)):
        options = {"forward_mode": forward_mode, "unroll": unroll}
        cost = lambda q, options=options: rollout(x, h0, q, bias, **options)[0].sum()
        print("rollout", options, milliseconds(jax.jit(jax.grad(cost)), q), flush=True)


if __name__ == "__main__":
    print(jax.devices()[0].device_kind, jax.__version__)
    matrices(int(sys.argv[1]))
    recurrences()
