"""Promises on orthogonality and accuracy, on vectors that are hard on a compact WY transform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from cwy.jax import (
    WY,
    _blocks,
    _linalg,
    cwy_matrix,
    cwy_multiply,
    rollout,
    tcwy_matrix,
    wy,
    wy_factors,
)
from cwy.jax.reference import reflect
from tests.helpers.families import FAMILIES
from tests.jax.helpers import departure_of, family, normal


@pytest.mark.parametrize(
    ("n", "size", "dtype"),
    [
        (1, 1, "float32"),
        (7, 48, "float32"),
        (48, 48, "float32"),
        (33, 17, "float64"),
        (48, 48, "float64"),
    ],
)
def test_orthogonal_for_every_family(n, size, dtype):
    """Also that no entry of T is above 4, that columns of U T have norm 2, and that Q is the
    product of reflections.
    """
    bound = 20 * np.finfo(dtype).eps * max(n, size)
    with jax.enable_x64(dtype == "float64"):
        v = np.stack([family(name, n, size, dtype, s) for name in FAMILIES for s in range(4)])

        @jax.jit
        def run(v):
            factors = wy_factors(v)
            eye = jnp.broadcast_to(jnp.eye(n, dtype=dtype), (len(v), n, n))
            multiplied = [cwy_multiply(v, eye), cwy_multiply(v, eye, True).mT]
            return factors, cwy_matrix(v), tcwy_matrix(v[..., :n]), multiplied, reflect(v, eye)

        (u, t), q, tall, multiplied, true = run(v)
    for made in (q, tall, *multiplied):
        assert departure_of(made) <= bound
    live = np.linalg.norm(u, axis=-2) > 0
    norms = np.linalg.norm(np.asarray(u, np.float64) @ np.asarray(t, np.float64), axis=-2)
    assert np.abs(t).max() <= 4.0004
    assert np.abs(norms[live] - 2).max() <= 1e-4
    if dtype == "float64":
        assert np.abs(q - true).max() <= 1e-12
        for made in multiplied:
            assert np.abs(made.mT - true).max() <= 1e-12 * n
        if size <= n:
            assert np.abs(tall - true[..., :size]).max() <= 1e-12


@pytest.mark.parametrize(("n", "size"), [(300, 300), (40, 200)])
def test_factors_of_several_blocks_in_float32(n, size):
    """No entry of T is above 4, and columns of U T have norm 2, on every family."""
    u, t = jax.jit(wy_factors)(np.stack([family(name, n, size) for name in FAMILIES]))
    live = np.linalg.norm(u, axis=-2) > 0
    norms = np.linalg.norm(np.asarray(u, np.float64) @ np.asarray(t, np.float64), axis=-2)
    assert np.abs(t).max() <= 4.0004
    assert np.abs(norms[live] - 2).max() <= 1e-4


HARD = ["parallel", "nearly parallel", "identical", "paired", "low rank", "non-negative"]


@pytest.mark.parametrize("n", [300, 512, 1024, pytest.param(4096, marks=pytest.mark.gpu)])
def test_large_sizes_in_float32(n):
    """At L = 300 the last block is not full."""
    eps = np.finfo("float32").eps
    form = jax.jit(cwy_matrix)
    gaussian = departure_of(form(family("gaussian", n, n)))
    assert gaussian <= 8 * eps * n**0.5
    seeds = range(8)
    if n > 512:
        seeds = range(1)
    for name in HARD:
        for seed in seeds:
            q = form(family(name, n, n, seed=seed))
            assert departure_of(q) <= 20 * eps * n, (name, seed)


@pytest.mark.parametrize(("n", "size"), [(129, 129), (40, 200), (300, 300)])
def test_products_by_factors_of_several_blocks(n, size):
    eye = np.eye(n, dtype="float32")
    multiply = jax.jit(lambda v: cwy_multiply(wy_factors(v), eye))
    for name in FAMILIES:
        q = multiply(family(name, n, size))
        assert departure_of(q) <= 20 * np.finfo("float32").eps * max(n, size), name


@pytest.fixture
def replaced_product(monkeypatch):
    """Replace the product of some modules."""

    def replace(product, modules):
        for module in modules:
            monkeypatch.setattr(module, "product", product)
        jax.clear_caches()

    yield replace
    jax.clear_caches()


def test_whatever_the_order_in_which_a_product_sums(replaced_product):
    """Kernels on a GPU sum in various orders. Here even and odd terms are summed apart, which is
    worst for reflections of nearly parallel vectors, whose terms alternate in sign.
    """
    plain = _linalg.product

    def product(a, b):
        even = plain(a[..., 0::2], b[..., 0::2, :])
        odd = plain(a[..., 1::2], b[..., 1::2, :])
        return even + odd

    replaced_product(product, (_linalg, _blocks, wy))
    test_large_sizes_in_float32(512)


def test_products_that_add_one_term_after_another(replaced_product):
    """Some kernels on a GPU do, and rounding errors of a long sum are larger then."""

    def product(a, b):
        columns = jnp.moveaxis(a, -1, 0)[..., None]
        rows = jnp.moveaxis(b, -2, 0)[..., None, :]
        batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        zero = jnp.zeros((*batch, a.shape[-2], b.shape[-1]), a.dtype)

        def add(total, pair):
            column, row = pair
            return total + column * row, None

        return jax.lax.scan(add, zero, (columns, rows))[0]

    # Not in the last product, whose errors are small in any case, and which would take long here.
    replaced_product(product, (_linalg, _blocks))
    n = 2048
    q = cwy_matrix(family("low rank", n, 512))
    # One sum over all rows would give 2.4.
    assert departure_of(q) <= 1.2 * np.finfo("float32").eps * n


def test_equals_lapack(x64):
    n, size = 64, 17
    v = np.tril(normal(n, size), -1) + np.eye(n, size)
    tau = torch.from_numpy(2 / np.square(v).sum(0))
    x = normal(n, 5, seed=1)
    columns = torch.linalg.householder_product(torch.from_numpy(v), tau)
    product = torch.ormqr(torch.from_numpy(v), tau, torch.from_numpy(x))
    np.testing.assert_allclose(tcwy_matrix(v), columns.numpy(), atol=1e-13, rtol=0)
    np.testing.assert_allclose(cwy_multiply(v, x.T).T, product.numpy(), atol=1e-13, rtol=0)


def test_scaling_a_vector_changes_nothing():
    v = family("gaussian", 33, 17)
    powers = (2.0 ** np.random.default_rng(0).integers(-60, 60, 17)).astype("float32")
    plain = cwy_matrix(v)
    np.testing.assert_array_equal(cwy_matrix(v * powers), plain)
    for scale in (1e-30, 1e30):
        np.testing.assert_allclose(cwy_matrix(v * np.float32(scale)), plain, atol=1e-6)
    assert np.isfinite(cwy_matrix(np.full((33, 17), 1e-42, "float32"))).all()


def test_zero_vectors_are_no_reflections(x64):
    v = normal(9, 6)
    v[:, [1, 4]] = 0
    q = cwy_matrix(v)
    # The same vectors in the same order, zeros last.
    np.testing.assert_allclose(q, cwy_matrix(v[:, [0, 2, 3, 5, 1, 4]]), atol=1e-14)
    np.testing.assert_array_equal(cwy_matrix(np.zeros((9, 6))), np.eye(9))
    for live, columns in ((4, []), (3, [0]), (1, [0, 2, 3])):
        fewer = v.copy()
        fewer[:, columns] = 0
        assert np.linalg.det(cwy_matrix(fewer)) == pytest.approx((-1) ** live, abs=1e-12)
    gradient = jax.jit(jax.grad(lambda v: (cwy_matrix(v) ** 3).sum()))(v)
    assert np.isfinite(gradient).all()
    assert not gradient[:, 1].any()


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_gradients_of_tiny_vectors_are_finite(dtype):
    """Weight decay takes vectors without a gradient there."""
    tiny = np.finfo("float32").tiny
    v = normal(9, 5, dtype=dtype)
    z = normal(9, 9, dtype=dtype, seed=1)

    @jax.jit
    def gradient(v, z):
        return jax.vjp(cwy_matrix, v)[1](z)[0]

    unit = v / np.linalg.norm(v, axis=0)
    for size in (2.0**16 * tiny, tiny, tiny / 2**8, 0):
        scale = np.ones(5, "float32")
        scale[[1, 3]] = size
        found = gradient(unit * scale, z)
        assert np.isfinite(found).all()
        assert not np.any(gradient(unit * scale, np.zeros_like(z)))


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 8e-3), ("float16", 1e-3)])
def test_half_precision_is_rounded_once(dtype, bound):
    v = jnp.asarray(normal(96, 96, dtype="float32"), dtype)
    wide = cwy_matrix(v.astype(jnp.float32))
    q = cwy_matrix(v)
    assert q.dtype == dtype
    np.testing.assert_array_equal(q, wide.astype(dtype))
    gap = np.asarray(q, np.float64).T @ np.asarray(q, np.float64) - np.eye(96)
    assert np.abs(gap).max() <= bound
    singular = np.linalg.svd(np.asarray(wide, np.float64))[1]
    assert np.abs(singular - 1).max() <= 2e-5
    assert cwy_multiply(v, jnp.ones((2, 96), dtype)).dtype == dtype


def test_states_keep_their_norm():
    """Over 10,000 linear steps in float32, also at the lowest default precision."""
    n = 128
    with jax.default_matmul_precision("bfloat16"):
        q = cwy_matrix(family("gaussian", n, n))
        h0 = normal(2, n, dtype="float32")
        states, last = rollout(np.zeros((10000, 2, n), "float32"), h0, q, nonlinearity="identity")
    norms = [np.linalg.norm(np.asarray(h, np.float64), axis=-1) for h in (h0, states[999], last)]
    assert np.abs(norms[1] / norms[0] - 1).max() <= 1e-4
    assert np.abs(norms[2] / norms[0] - 1).max() <= 1e-3


def test_float32_gradients_are_those_of_float64():
    bounds = {"gaussian": 1e-5, "parallel": 5e-4, "nearly parallel": 5e-4}
    v = np.stack([family(name, 64, 64) for name in bounds])
    x = normal(3, 5, 64, dtype="float32")

    calls = [
        lambda v, x: cwy_matrix(v),
        lambda v, x: cwy_matrix(v[..., :20]),
        lambda v, x: tcwy_matrix(v[..., :20]),
        lambda v, x: cwy_multiply(v[..., :20], x),
    ]
    shapes = [jax.eval_shape(call, v, x).shape for call in calls]
    cotangents = [normal(*shape, dtype="float32", seed=2 + i) for i, shape in enumerate(shapes)]

    @jax.jit
    def gradients(v, x, cotangents):
        found = []
        for call, z in zip(calls, cotangents, strict=True):
            pull = jax.vjp(lambda v, call=call: call(v, x), v)[1]
            found.append(pull(z)[0])
        return found

    single = gradients(v, x, cotangents)
    with jax.enable_x64(True):
        double = gradients(*jax.tree.map(lambda a: a.astype("float64"), (v, x, cotangents)))
    for found, truth in zip(single, double, strict=True):
        g, truth = np.asarray(found, np.float64), np.asarray(truth)
        for k, bound in enumerate(bounds.values()):
            assert np.linalg.norm(g[k] - truth[k]) <= bound * np.linalg.norm(truth[k])
        # The gradient is across the vectors: weight decay changes only their norms.
        sizes = np.linalg.norm(v, axis=-2) * np.linalg.norm(g, axis=-2)
        along = np.abs((v * g).sum(-2)) / np.where(sizes == 0, 1, sizes)
        assert along.max() <= 1e-5


def test_empty_batches_and_no_reflections():
    assert cwy_matrix(np.zeros((0, 4, 2))).shape == (0, 4, 4)
    np.testing.assert_array_equal(cwy_matrix(np.zeros((3, 0))), np.eye(3))
    assert cwy_multiply(np.ones((4, 2)), np.zeros((0, 4))).shape == (0, 4)
    u, t = wy_factors(np.zeros((4, 0)))
    assert cwy_multiply(WY(u, t), np.ones((3, 4))).shape == (3, 4)
