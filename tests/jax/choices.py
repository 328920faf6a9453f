"""Time the choices that ``cwy.jax`` makes, on this device: ``python -m tests.jax.choices N``.

Columns of a block and ways to invert for Q of N x N, the algorithms of a product, and the unrolling
of a recurrence.
"""

import os
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

from cwy.jax import _blocks, _linalg, cwy_matrix, init, rollout, wy

ALGORITHMS = (
    jax.lax.Precision.HIGHEST,
    jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
    jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X9,
)


def milliseconds(call, *given):
    """Return what compiling took, in seconds, and the least time of a call in three rows of 10."""
    begin = time.perf_counter()
    jax.block_until_ready(call(*given))
    first = time.perf_counter() - begin
    least = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(10):
            result = call(*given)
        jax.block_until_ready(result)
        least = min(least, (time.perf_counter() - begin) / 10)
    return f"{least * 1e3:9.3f} ms, first call {first:5.1f} s"


def matrices(n):
    v = jax.random.normal(jax.random.key(0), (n, n))
    for way in ("products", "solve"):
        for columns in (32, 64, 128):
            _blocks.COLUMNS = columns
            _blocks.triangular_inverse = lambda s, way=way: _linalg.triangular_inverse(s, way)
            form = lambda v: wy._first_columns(v, n)
            both = jax.jit(lambda v, z, form=form: jax.vjp(form, v)[1](z))
            print(n, way, columns, milliseconds(both, v, v), flush=True)


def products(n):
    """Time a product by each algorithm, with its error in 64 rows relative to the norms."""
    left, right = jax.random.normal(jax.random.key(0), (2, n, n))
    truth = np.asarray(left[:64], np.float64) @ np.asarray(right, np.float64)
    for algorithm in ALGORITHMS:
        call = jax.jit(lambda a, b, algorithm=algorithm: jnp.matmul(a, b, precision=algorithm))
        try:
            taken = milliseconds(call, left, right)
        except Exception as error:
            print("product", algorithm, "is not here:", str(error).splitlines()[0][:80], flush=True)
            continue
        gap = np.linalg.norm(np.asarray(call(left, right)[:64], np.float64) - truth)
        error = gap / np.linalg.norm(truth)
        print("product", n, algorithm, taken, f"error {error:.1e}", flush=True)


def maps_by(n):
    """Time Q and its gradient by each algorithm, with what they cost in orthogonality."""
    normal = jax.random.normal(jax.random.key(0), (n, n))
    parallel = normal[:, :1] + 1e-3 * normal
    for algorithm in ALGORITHMS:
        _linalg.HIGHEST = algorithm
        form = lambda v: wy._first_columns(v, n)
        both = jax.jit(lambda v, z, form=form: (form(v), jax.vjp(form, v)[1](z)))
        try:
            taken = milliseconds(both, normal, normal)
        except Exception as error:
            print("map", algorithm, "is not here:", str(error).splitlines()[0][:80], flush=True)
            continue
        gaps = []
        for v in (normal, parallel):
            q = np.asarray(both(v, normal)[0][:, :256], np.float64)
            gaps.append(f"{np.linalg.norm(q.T @ q - np.eye(q.shape[1]), 2):.1e}")
        print("map", n, algorithm, taken, "departure in 256 columns", *gaps, flush=True)
    _linalg.HIGHEST = ALGORITHMS[0]


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
    products(int(sys.argv[1]))
    maps_by(int(sys.argv[1]))
    matrices(int(sys.argv[1]))
    recurrences()
