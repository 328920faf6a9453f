"""Run by test_sharding.py, in a process with 8 host devices: rows or a batch divided among them."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cwy.jax import WY, cwy_matrix, cwy_multiply, rollout, tcwy_matrix, wy_factors

N, L, BATCH = 64, 5, 3
COLLECTIVE = re.compile(r"stablehlo\.(all_\w+|collective_\w+|reduce_scatter)")


def collectives(lowered):
    """The collectives of a program, with the shape of their results."""
    lines = lowered.as_text().splitlines()
    found = []
    for number, line in enumerate(lines):
        name = COLLECTIVE.search(line)
        if name:
            # A reduction has a body, after which its type stands.
            after = "\n".join(lines[number : number + 6])
            shape = re.search(r"-> tensor<([\dx]*)f\d+>", after)[1]
            found.append([name[1], [int(part) for part in shape.split("x") if part]])
    return found


def batch_gaps(mesh, rng):
    """How far maps and recurrences of a divided batch are from those on one device."""
    gaps = {}
    for size in (8, 9, 70):
        v = rng.standard_normal((8, 70, size))
        divided = jax.device_put(v, NamedSharding(mesh, P("rows", None, None)))
        for map in (cwy_matrix, tcwy_matrix):
            cost = lambda v, map=map: jnp.sum(jnp.sin(map(v)))
            gap = jax.jit(jax.grad(cost))(divided) - jax.grad(cost)(v)
            gaps[f"{map.__name__} of a divided batch, {size}"] = gap
    x = rng.standard_normal((4, 16, 6))
    h0 = rng.standard_normal((16, 6))
    bias = rng.standard_normal(6)
    steps = P(None, "rows", None)
    states = P("rows", None)
    divided = (
        jax.device_put(x, NamedSharding(mesh, steps)),
        jax.device_put(h0, NamedSharding(mesh, states)),
    )
    few = rng.standard_normal((6, 2))
    for name, transition in (("formed", cwy_matrix(few)), ("factors", wy_factors(few))):

        def cost(x, h0, transition, bias):
            return jnp.sum(jnp.sin(rollout(x, h0, transition, bias)[0]))

        def local(x, h0, transition, bias):
            # Those zeros do not vary over the devices.
            started = cost(x, jnp.zeros_like(bias, shape=h0.shape), transition, bias)
            return jax.lax.psum(cost(x, h0, transition, bias) + started, "rows")

        def whole(x, h0, transition, bias):
            return cost(x, h0, transition, bias) + cost(x, 0 * h0, transition, bias)

        mapped = jax.shard_map(local, mesh=mesh, in_specs=(steps, states, P(), P()), out_specs=P())
        every = (0, 1, 2, 3)
        expected = jax.grad(whole, every)(x, h0, transition, bias)
        found = jax.jit(jax.grad(mapped, every))(*divided, transition, bias)
        copied = jax.device_put((transition, bias), NamedSharding(mesh, P()))
        alone = jax.jit(jax.grad(whole, every))(*divided, *copied)
        for way, gradients in (("shard_map", found), ("mesh", alone)):
            pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True)
            for k, (one, other) in enumerate(pairs):
                gaps[f"rollout, {name}, {way}, gradient {k}"] = one - np.asarray(other)
    return gaps


def main():
    assert jax.device_count() == 8
    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    v = rng.standard_normal((N, L))
    x = rng.standard_normal((BATCH, N))
    mesh = jax.make_mesh((8,), ("rows",))
    rows = P("rows", None)
    columns = P(None, "rows")
    u, t = wy_factors(v)

    by_factors = jax.jit(
        jax.shard_map(
            lambda u, t, x: cwy_multiply(WY(u, t), x, axis_name="rows"),
            mesh=mesh,
            in_specs=(rows, P(), columns),
            out_specs=columns,
        )
    )
    by_vectors = jax.jit(
        jax.shard_map(
            lambda v, x: cwy_multiply(v, x, axis_name="rows"),
            mesh=mesh,
            in_specs=(rows, columns),
            out_specs=columns,
        )
    )
    factors = jax.jit(
        jax.shard_map(
            lambda v: wy_factors(v, axis_name="rows"),
            mesh=mesh,
            in_specs=(rows,),
            out_specs=WY(rows, P()),
        )
    )
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    given = place(u, rows), place(t, P()), place(x, columns)
    split = place(v, rows), place(x, columns)
    cost = lambda call: lambda v, x: jnp.sum(jnp.sin(call(v, x)))
    through_factors = lambda v, x: by_factors(*factors(v), x)
    expected = jax.grad(cost(cwy_multiply), (0, 1))(v, x)
    gaps = {
        "by factors": by_factors(*given) - cwy_multiply(v, x),
        "by vectors": by_vectors(*split) - cwy_multiply(v, x),
        "t": factors(split[0]).t - t,
    }
    for name, call in (("by vectors", by_vectors), ("by factors", through_factors)):
        found = jax.jit(jax.grad(cost(call), (0, 1)))(*split)
        for k, (one, other) in enumerate(zip(found, expected, strict=True)):
            gaps[f"gradient {k} {name}"] = one - other
    many = rng.standard_normal((8, 6, 4))
    gaps["pmap"] = jax.pmap(cwy_matrix)(many) - cwy_matrix(many)
    gaps |= batch_gaps(mesh, rng)
    report = {
        "gaps": {name: float(np.abs(np.asarray(gap)).max()) for name, gap in gaps.items()},
        "local rows": int(by_factors(*given).addressable_shards[0].data.shape[-1]),
        "by factors": collectives(by_factors.lower(*given)),
        "factors": collectives(factors.lower(split[0])),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
