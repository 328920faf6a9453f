"""Run by test_sharding.py, in a process with 8 host devices: rows divided among them."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cwy.jax import WY, cwy_matrix, cwy_multiply, wy_factors

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
    report = {
        "gaps": {name: float(jnp.abs(gap).max()) for name, gap in gaps.items()},
        "local rows": int(by_factors(*given).addressable_shards[0].data.shape[-1]),
        "by factors": collectives(by_factors.lower(*given)),
        "factors": collectives(factors.lower(split[0])),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
