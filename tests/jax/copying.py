"""Copying trained in JAX and in torch, from the same initial values and data.

``python -m tests.jax.copying --record FILE`` trains in JAX until the loss is below 0.001 and
appends a line of JSON to the file.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cwy import jax as cj
from cwy._provenance import commit

SYMBOLS, LENGTH = 8, 10
RATE = 1e-3
ORTHOGONAL_RATE = 1e-4
GOAL = 1e-3


def initial(n, seed=0):
    """Initial values as numpy arrays, in float32: Henaff's transition, Kaiming's maps."""
    rng = np.random.default_rng(seed)
    q = cj.init.henaff(jax.random.key(seed), n)
    v, signs = cj.householder_vectors(q)
    made = {
        "v": v,
        "weight": rng.standard_normal((n, SYMBOLS + 2)) * (2 / (SYMBOLS + 2)) ** 0.5,
        "bias": rng.uniform(-0.01, 0.01, n),
        "readout": rng.standard_normal((SYMBOLS + 1, n)) * (2 / n) ** 0.5,
        "offset": np.zeros(SYMBOLS + 1),
    }
    return {name: np.array(x, "float32") for name, x in made.items()}, np.array(signs)


def batch(step, size, blanks, seed=0):
    """Inputs and targets ``(T + 20, B)`` of one step: symbols, blanks, a cue, blanks."""
    rng = np.random.default_rng([seed, step])
    symbols = rng.integers(1, SYMBOLS + 1, (LENGTH, size))
    x = np.zeros((blanks + 2 * LENGTH, size), "int32")
    x[:LENGTH] = symbols
    x[blanks + LENGTH] = SYMBOLS + 1
    y = np.zeros_like(x)
    y[-LENGTH:] = symbols
    return x, y


def loss(values, signs, x, y):
    """Return the mean cross-entropy over all positions."""
    q = cj.cwy_matrix(values["v"], signs=signs)
    dtype = q.dtype
    units = jax.nn.one_hot(x, SYMBOLS + 2, dtype=dtype)
    h0 = jnp.zeros((x.shape[1], len(q)), dtype)
    states, _ = cj.rollout(units, h0, q, values["bias"], weight=values["weight"])
    logits = jnp.matmul(states, values["readout"].T, precision="highest") + values["offset"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def trainer():
    """Return Adam with a learning rate of its own for the reflection vectors."""
    rates = {"free": optax.adam(RATE), "vectors": optax.adam(ORTHOGONAL_RATE)}
    kind = lambda values: {name: "vectors" if name == "v" else "free" for name in values}
    return optax.multi_transform(rates, kind)


def train(values, signs, iterations, size, blanks, goal=0.0):
    """Yield the loss of every step, until it is below the goal."""
    optimizer = trainer()
    state = optimizer.init(values)

    @jax.jit
    def step(values, state, x, y):
        cost, gradients = jax.value_and_grad(loss)(values, signs, x, y)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(values, updates), state, cost

    for i in range(iterations):
        values, state, cost = step(values, state, *batch(i, size, blanks))
        yield float(cost)
        if cost < goal:
            return


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--blanks", type=int, default=200)
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    begin = time.perf_counter()
    values, signs = initial(given.n)
    losses = []
    for cost in train(values, signs, given.iterations, given.batch, given.blanks, GOAL):
        losses.append(cost)
        if len(losses) % 100 == 1:
            print(len(losses), f"{cost:.5f}", f"{time.perf_counter() - begin:.0f} s", flush=True)
    record = {
        "run": f"copying/{given.blanks} in JAX",
        "n": given.n,
        "batch": given.batch,
        "iterations": len(losses),
        "loss": losses[-1],
        "baseline": 10 * np.log(SYMBOLS) / (given.blanks + 2 * LENGTH),
        "losses": [round(cost, 6) for cost in losses[::50]],
        "seconds": round(time.perf_counter() - begin, 1),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "commit": commit(),
    }
    print(json.dumps(record))
    if given.record:
        with given.record.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
