"""``cwy.jax`` computes what ``cwy.ops`` computes: results and all gradients, on the same inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from cwy import init as torch_init
from cwy import jax as cj
from cwy import ops
from cwy.parametrizations.reflections import matched_length
from tests.jax.helpers import (
    assert_close,
    departure_of,
    family,
    jax_value_and_gradients,
    normal,
    torch_value_and_gradients,
)

# Few reflections and many, one block and several, and more columns than rows.
CASES = [
    ((2, 9, 3), "float64"),
    ((2, 9, 3), "complex128"),
    ((70, 70), "float64"),
    ((20, 90), "complex128"),
]


def everything(module):
    """Every function of the vectors and of rows."""

    def call(v, x):
        factors = module.wy_factors(v)
        return [
            module.cwy_matrix(v),
            module.tcwy_matrix(v[..., :7]),
            module.cwy_multiply(v, x),
            module.cwy_multiply(v, x, True),
            module.cwy_multiply(factors, x),
            module.cwy_multiply(factors, x, True),
            factors.u,
            factors.t,
        ]

    return call


def both(v, x, seed=2):
    """Results and gradients of everything, by torch and by JAX."""
    shapes = [out.shape for out in everything(ops)(torch.from_numpy(v), torch.from_numpy(x))]
    cotangents = [normal(*shape, dtype=v.dtype, seed=seed) for shape in shapes]
    expected = torch_value_and_gradients(everything(ops), [v, x], cotangents)
    return jax_value_and_gradients(everything(cj), [v, x], cotangents), expected


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_equals_cwy_ops(shape, dtype, x64):
    v = normal(*shape, dtype=dtype)
    x = normal(*shape[:-2], 3, shape[-2], dtype=dtype, seed=1)
    assert_close(*both(v, x), 1e-12)


def test_equals_cwy_ops_in_single_precision():
    v, x = normal(40, 33, dtype="float32"), normal(3, 40, dtype="float32", seed=1)
    assert_close(*both(v, x), 1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [("complex64", 1e-5), ("bfloat16", 0.03)])
def test_results_have_the_dtype_of_cwy_ops(dtype, bound):
    wide = dtype.replace("bfloat16", "float32")
    v, x = normal(40, 33, dtype=wide), normal(3, 40, dtype=wide, seed=1)
    given = [torch.from_numpy(a).to(getattr(torch, dtype)) for a in (v, x)]
    found = jax.jit(everything(cj))(*(jnp.asarray(a, dtype) for a in (v, x)))
    for f, e in zip(found, everything(ops)(*given), strict=True):
        assert str(e.dtype) == f"torch.{f.dtype}"
        gap = np.asarray(f.astype(wide)) - e.to(getattr(torch, wide)).numpy()
        assert np.abs(gap).max() <= bound


def test_equals_cwy_ops_on_hard_vectors(x64):
    names = ["parallel", "identical", "paired", "zero", "scaled", "low rank"]
    v = np.stack([family(name, 24, 24, "float64") for name in names])
    found, expected = both(v, normal(6, 3, 24))
    # Gradients are in units of the reciprocal norms.
    size = np.linalg.norm(v, axis=-2, keepdims=True)
    assert_close(found[:-2], expected[:-2], 1e-12)
    assert_close([found[-2] * size, found[-1]], [expected[-2] * size, expected[-1]], 1e-9)


def test_signs_multiply_the_columns():
    v, signs = normal(2, 7, 3, dtype="float32"), np.sign(normal(2, 7, dtype="float32"))
    for form, given in (("cwy_matrix", signs), ("tcwy_matrix", signs[:, :3])):
        expected = getattr(ops, form)(torch.from_numpy(v), signs=torch.from_numpy(given.copy()))
        found = getattr(cj, form)(v, signs=given)
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)


ROLLOUTS = [
    ("modrelu", "float64"),
    ("abs", "float64"),
    ("relu", "float64"),
    ("leaky_relu", "float64"),
    ("tanh", "float64"),
    ("identity", "float64"),
    ("modrelu", "complex128"),
    ("identity", "complex128"),
]


@pytest.mark.parametrize(("nonlinearity", "dtype"), ROLLOUTS)
def test_rollout_equals_cwy_ops(nonlinearity, dtype, x64):
    """With input weights, signs and lengths. 9 reflections are formed, 3 are in low-rank form."""
    n = 9
    inputs = [
        normal(6, 3, 5, dtype=dtype),
        normal(3, n, dtype=dtype, seed=1),
        normal(n, n, dtype=dtype, seed=2),
        0.1 * normal(n, seed=3),
        normal(n, 5, dtype=dtype, seed=4),
    ]
    signs = np.sign(normal(n, seed=5)).astype(dtype)
    # torch's packing has no derivative for complex sequences.
    lengths = None if dtype == "complex128" else np.array([6, 2, 4])

    def call(module, array):
        def run(x, h0, v, bias, weight):
            options = {"signs": array(signs), "weight": weight}
            if lengths is not None:
                options["lengths"] = array(lengths)
            if module is cj:
                options["unroll"] = 2
            found = []
            for columns in (v, v[:, :3]):
                factors = module.wy_factors(columns)
                found += module.rollout(x, h0, factors, bias, nonlinearity, **options)
            return found

        return run

    shapes = [(6, 3, n), (3, n)] * 2
    cotangents = [normal(*shape, dtype=dtype, seed=6 + i) for i, shape in enumerate(shapes)]
    expected = torch_value_and_gradients(call(ops, torch.from_numpy), inputs, cotangents)
    found = jax_value_and_gradients(call(cj, jnp.asarray), inputs, cotangents)
    assert_close(found, expected, 1e-12)


def test_rollout_without_steps_or_all_states(x64):
    h0 = normal(2, 4)
    q = np.eye(4)
    states, last = cj.rollout(np.zeros((0, 2, 4)), h0, q)
    assert states.shape == (0, 2, 4)
    np.testing.assert_array_equal(last, h0)
    x = normal(5, 2, 4)
    states, last = cj.rollout(x, h0, q, nonlinearity="tanh")
    nothing, only = cj.rollout(x, h0, q, nonlinearity=jnp.tanh, output="last")
    assert nothing is None
    np.testing.assert_allclose(only, last, atol=1e-14)
    np.testing.assert_array_equal(states[-1], last)


def matrices(n, dtype):
    eye = np.eye(n, dtype=dtype)
    gauss = normal(n, n, dtype=dtype)
    yield eye
    yield -eye
    yield np.roll(eye, 1, 0)
    yield np.linalg.qr(gauss)[0]
    yield torch.linalg.matrix_exp(torch.from_numpy(1e-4 * (gauss - gauss.conj().T))).numpy()


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_householder_vectors_invert(dtype, x64):
    bound = 5e-6 if dtype in ("float32", "complex64") else 1e-13
    traced = jax.jit(cj.householder_vectors)
    for q in matrices(16, dtype):
        for find, m in ((cj.householder_vectors, 16), (cj.householder_vectors, 8), (traced, 16)):
            v, signs = find(q[:, :m])
            assert np.linalg.norm(v, axis=0).min() > 0.9
            assert v.dtype == signs.dtype == dtype
            assert np.abs(cj.tcwy_matrix(v) * signs - q[:, :m]).max() <= bound


def test_few_reflections_are_found(x64):
    for size, count in ((3, 3), (3, 5), (6, 6), (1, 2)):
        q = cj.cwy_matrix(normal(2, 9, size))
        v, signs = cj.householder_vectors(q, count)
        assert v.shape == (2, 9, count)
        np.testing.assert_allclose(cj.cwy_matrix(v, signs=signs), q, atol=1e-9)
    q = np.linalg.qr(normal(9, 9))[0]
    with pytest.raises(ValueError, match="do not reach"):
        cj.householder_vectors(q, 2)


def test_initial_values():
    key = jax.random.key(0)
    for name in ("henaff", "helfrich", "haar"):
        q = getattr(cj.init, name)(key, 9, batch=(2,))
        assert q.shape == (2, 9, 9)
        assert max(departure_of(one) for one in q) < 1e-5
    np.testing.assert_array_equal(cj.init.identity(4, 2), np.eye(4, 2))
    # henaff and helfrich turn the same planes as torch's, by angles in the same range.
    for name, low, high in (("henaff", -np.pi, np.pi), ("helfrich", 0, np.pi / 2)):
        ours = np.asarray(getattr(cj.init, name)(key, 801, reflections=800))
        theirs = getattr(torch_init, name)(801, reflections=800).numpy()
        np.testing.assert_array_equal(ours != 0, theirs != 0)
        angles = np.arctan2(np.diagonal(ours, 1)[::2], np.diagonal(ours)[:-1:2])
        assert low <= angles.min() < low + 0.05
        assert high - 0.05 < angles.max() <= high
    v = cj.init.random(key, 12, 5)
    np.testing.assert_allclose(np.linalg.norm(v, axis=0), matched_length(12, 5, 5), rtol=1e-6)
    for shape in ((12, 5, 5), (64, 64, 64), (64, 64, 7)):
        assert cj.init.matched_length(*shape) == matched_length(*shape)


def test_haar_is_uniform():
    """The entries of Haar-random matrices have mean 0, variance 1/N, and no preferred sign."""
    q = np.asarray(cj.init.haar(jax.random.key(0), 3, batch=(20000,)))
    assert np.abs(q.mean(0)).max() < 0.02
    assert np.abs((q**2).mean(0) - 1 / 3).max() < 0.02
    assert abs(np.linalg.det(q.astype(np.float64)).mean()) < 0.05
