"""Bad input gets an error that names the call, what came, and what to do."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cwy.jax import (
    WY,
    cwy_matrix,
    cwy_multiply,
    householder_vectors,
    init,
    rollout,
    tcwy_matrix,
    wy_factors,
)

EYE = np.eye(3, dtype="float32")
X = np.zeros((4, 2, 3), "float32")
H = np.zeros((2, 3), "float32")
KNOWN = jnp.asarray(EYE)
KEY = jax.random.key(0)
NAN = np.array([1, np.nan, 1], "float32")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cwy_matrix([1.0]), "cwy_matrix: v must be a jax.Array"),
        (lambda: cwy_matrix(np.ones(3)), r"must have shape \(\*, N, L\)"),
        (lambda: cwy_matrix(np.ones((3, 2), int)), "must be floating-point"),
        (lambda: cwy_matrix(EYE, signs=np.ones(2)), "one number per column"),
        (lambda: cwy_matrix(EYE, signs=2 * np.ones(3)), "must be ±1"),
        (lambda: tcwy_matrix(np.ones((2, 3))), "M <= N, got N = 2, M = 3"),
        (lambda: cwy_multiply(EYE, np.ones((3, 2))), "x must be"),
        (lambda: householder_vectors(2 * EYE), "not orthogonal"),
        (lambda: householder_vectors(EYE[:2]), "expected N >= M"),
        (lambda: householder_vectors(EYE, 4), "between 1 and 3"),
        (lambda: rollout(X, H, np.eye(2)), r"transition must be \(3, 3\)"),
        (lambda: rollout(X[:, :1], H, EYE), r"expected x \(T, 2, 3\)"),
        (lambda: rollout(X, H, EYE, nonlinearity="softplus"), "must be one of 'modrelu'"),
        (lambda: rollout(X, H, EYE, lengths=[5, 1]), "whole numbers from 1 to T = 4"),
        (lambda: rollout(X, H, EYE, signs=np.ones(3)), "signs belong to factors"),
        (lambda: rollout(X, H, WY(EYE, np.eye(2)), output="all"), "the factors must be"),
        (lambda: rollout(X, H, EYE, output="first"), "'all' or 'last'"),
        (lambda: rollout(X, H, EYE * 1j, nonlinearity="tanh"), "has no complex form"),
        (lambda: rollout(X, H, EYE, jnp.ones(3) * 1j), "bias must be real"),
        (lambda: init.henaff(None, 3, 2), "makes a square matrix"),
        (lambda: init.haar(None, 3, reflections=2), "do not reach"),
        (lambda: init.random(None, 3, 2, reflections=1), "reflections must be 2"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def ones(*shape):
    return np.ones(shape, "float32")


def sharded(axis_name):
    """The factor t of rows that are divided over a mesh with the axes "rows" and "batch"."""
    mesh = jax.make_mesh((1, 1), ("rows", "batch"))
    factors = lambda v: wy_factors(v, axis_name=axis_name).t
    divided = jax.shard_map(factors, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(divided)(ones(3, 2))


MISTAKES = [
    # Factors that do not fit together.
    ("cwy_multiply", "(3, 2) and (3, 3)", lambda: cwy_multiply(WY(ones(3, 2), EYE), ones(3))),
    (
        "cwy_multiply",
        "(5, 3, 2) and (4, 2, 2)",
        lambda: cwy_multiply(WY(ones(5, 3, 2), ones(4, 2, 2)), ones(5, 3)),
    ),
    ("cwy_multiply", "(3,) and (3, 3)", lambda: cwy_multiply(WY(ones(3), EYE), ones(3))),
    ("rollout", "(3, 2) and (3, 3)", lambda: rollout(X, H, WY(ones(3, 2), EYE))),
    # Signs.
    ("cwy_matrix", "nan", lambda: cwy_matrix(EYE, signs=NAN)),
    ("cwy_matrix", "nan", lambda: jax.jit(lambda v: cwy_matrix(v, signs=NAN))(EYE)),
    ("tcwy_matrix", "nan", lambda: tcwy_matrix(EYE, signs=NAN)),
    ("rollout", "nan", lambda: rollout(X, H, wy_factors(EYE), signs=NAN)),
    ("householder_vectors", "nan", lambda: householder_vectors(EYE, 2, signs=NAN)),
    ("householder_vectors", "(5,)", lambda: householder_vectors(EYE, 2, signs=ones(5))),
    ("householder_vectors", "(5,)", lambda: householder_vectors(EYE, signs=ones(5))),
    (
        "householder_vectors",
        "(5,)",
        lambda: jax.jit(lambda q: householder_vectors(q, signs=ones(5)))(EYE),
    ),
    ("householder_vectors", "complex64", lambda: householder_vectors(EYE, 2, signs=ones(3) + 0j)),
    (
        "householder_vectors",
        "float32[3]",
        lambda: jax.jit(lambda s: householder_vectors(KNOWN, 2, signs=s))(ones(3)),
    ),
    # Counts.
    *(
        ("householder_vectors", repr(count), lambda count=count: householder_vectors(EYE, count))
        for count in (2.0, True, "2", 0, -1)
    ),
    ("householder_vectors", "0 x 0", lambda: householder_vectors(ones(0, 0))),
    (
        "householder_vectors",
        "int32[]",
        lambda: jax.jit(lambda count: householder_vectors(EYE, count))(2),
    ),
    # Initial values.
    ("henaff", "-3", lambda: init.henaff(KEY, 4, reflections=-3)),
    ("helfrich", "2.5", lambda: init.helfrich(KEY, 4, reflections=2.5)),
    ("haar", "-1", lambda: init.haar(KEY, -1)),
    ("haar", "4.0", lambda: init.haar(KEY, 4.0)),
    ("haar", "'2'", lambda: init.haar(KEY, 4, "2")),
    ("identity", "int32[]", lambda: jax.jit(init.identity)(3)),
    ("identity", "got 3", lambda: init.identity(3, batch=3)),
    ("haar", "(-1,)", lambda: init.haar(KEY, 3, batch=(-1,))),
    ("henaff", "'ab'", lambda: init.henaff(KEY, 3, batch="ab")),
    ("random", "0 x 0", lambda: init.random(KEY, 0)),
    ("random", "99", lambda: init.random(KEY, 4, reflections=99)),
    ("random", "got 0", lambda: init.random(KEY, 4, reflections=0)),
    ("random", "'a'", lambda: init.random(KEY, 4, length="a")),
    ("random", "got 0", lambda: init.random(0, 4)),
    ("henaff", "None", lambda: init.henaff(None, 4)),
    ("haar", "(2,)", lambda: init.haar(jax.random.split(KEY), 4)),
    ("helfrich", "float32 of shape (2,)", lambda: init.helfrich(ones(2), 4)),
    ("helfrich", "bool[]", lambda: jax.jit(lambda b: init.helfrich(KEY, 4, exp=b))(True)),
    *(
        ("identity", repr(dtype), lambda dtype=dtype: init.identity(3, dtype=dtype))
        for dtype in (int, jnp.float8_e4m3fn, "banana")
    ),
    ("haar", "int16", lambda: init.haar(KEY, 3, dtype=jnp.int16)),
    # Recurrences.
    ("rollout", "['tanh']", lambda: rollout(X, H, EYE, nonlinearity=["tanh"])),
    ("rollout", "2.5", lambda: rollout(X, H, EYE, unroll=2.5)),
    ("rollout", "got 0", lambda: rollout(X, H, EYE, unroll=0)),
    ("rollout", "'ab'", lambda: rollout(X, H, EYE, lengths="ab")),
    ("rollout", "[[1], [1, 2]]", lambda: rollout(X, H, EYE, lengths=[[1], [1, 2]])),
    ("rollout", "bool[]", lambda: jax.jit(lambda b: rollout(X, H, EYE, forward_mode=b))(True)),
    # What must be known before jit, and axes of a mesh.
    ("cwy_multiply", "bool[]", lambda: jax.jit(cwy_multiply)(EYE, EYE, True)),
    ("cwy_multiply", "'rows'", lambda: cwy_multiply(EYE, EYE, axis_name="rows")),
    ("wy_factors", "'row'", lambda: sharded("row")),
    ("wy_factors", "'row'", lambda: sharded(["rows", "row"])),
    ("wy_factors", "got 3", lambda: wy_factors(EYE, axis_name=3)),
]


@pytest.mark.parametrize(("name", "came", "call"), MISTAKES)
def test_mistakes_name_the_call_and_what_came(name, came, call):
    with pytest.raises((TypeError, ValueError), match=f"^{name}: .*{re.escape(came)}"):
        call()


STRANGE = [
    np.full((3, 2), "a"),
    np.ones((3, 2), object),
    np.ones((3, 2), ">f4"),
    np.ones((3, 2), "datetime64[s]"),
    jnp.ones((3, 2), jnp.float8_e4m3fn),
    np.ones((3, 2), bool),
    jax.random.split(KEY, (3, 2)),
]
if np.dtype(np.longdouble) != np.float64:
    STRANGE += [np.ones((3, 2), np.longdouble), np.ones((3, 2), np.clongdouble)]


@pytest.mark.parametrize("v", STRANGE, ids=lambda v: str(v.dtype))
def test_no_function_takes_an_array_of_another_dtype(v):
    calls = {
        "wy_factors": wy_factors,
        "cwy_matrix": cwy_matrix,
        "tcwy_matrix": tcwy_matrix,
        "householder_vectors": householder_vectors,
        "cwy_multiply": lambda v: cwy_multiply(v, ones(3)),
        "rollout": lambda v: rollout(X, H, EYE, weight=v),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"^{name}: .*float64.*got {re.escape(str(v.dtype))}"):
            call(v)


def test_what_is_right_is_still_taken():
    traced = jax.jit(lambda q, s: cwy_matrix(q, signs=s))(EYE, NAN)
    assert np.isnan(traced[:, 1]).all()
    assert np.isfinite(traced[:, 0]).all()
    for axis_name in ("rows", ["rows"], ("rows", "batch")):
        np.testing.assert_allclose(sharded(axis_name), wy_factors(ones(3, 2)).t)
    two = jnp.stack([EYE, EYE])
    v, signs = householder_vectors(two, np.int64(2), signs=ones(3))
    np.testing.assert_allclose(cwy_matrix(v, signs=signs), two, atol=1e-6)
    # Values that are known inside jit are used there, too.
    inside = jax.jit(lambda: householder_vectors(two, 2, signs=ones(3)))()
    np.testing.assert_array_equal(inside[0], v)
    # A matrix may use more reflections than it has columns, as in torch's cwy.init.
    for name in ("haar", "henaff", "helfrich"):
        draw = getattr(init, name)
        many = draw(KEY, np.int64(4), reflections=99, batch=[2])
        np.testing.assert_array_equal(many, draw(KEY, 4, batch=(2,)))
    old = jax.random.PRNGKey(0)
    assert init.random(old, 4, dtype="bfloat16").dtype == jnp.bfloat16
    assert jax.vmap(lambda key: init.random(key, 4))(jax.random.split(KEY)).shape == (2, 4, 4)
    assert init.identity(0, reflections=0).shape == (0, 0)
