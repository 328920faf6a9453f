"""What users compose: jit, grad, jvp, vmap, checkpoint, scan, second derivatives, precision."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cwy.jax import cwy_matrix, cwy_multiply, householder_vectors, rollout, tcwy_matrix, wy_factors
from cwy.jax._linalg import triangular_inverse
from cwy.jax.recurrence import NONLINEARITIES
from tests.jax.helpers import equations, family, normal


def everything(v):
    """Every function of ``v (5, 4)``, with few and many reflections, as one vector."""
    found = [
        cwy_matrix(v[:, :2]),
        cwy_matrix(v),
        tcwy_matrix(v[:, :3]),
        cwy_multiply(v, v[:, 0]),
        cwy_multiply(wy_factors(v), v[:, 0], True),
    ]
    return jnp.concatenate([part.ravel() for part in found])


def of_parts(w):
    """Some of complex vectors, from and to real and imaginary parts."""
    v = w[0] + 1j * w[1]
    found = [cwy_matrix(v[:, :1]), cwy_matrix(v), cwy_multiply(v, v[:, 0])]
    out = jnp.concatenate([part.ravel() for part in found])
    return jnp.concatenate([out.real, out.imag])


@pytest.mark.slow
@pytest.mark.parametrize(("call", "shape"), [(everything, (5, 4)), (of_parts, (2, 3, 3))])
def test_derivatives(call, shape, x64):
    """First and second ones, forward, reverse and mixed, against difference quotients."""
    v = normal(*shape)
    step = 1e-6
    cost = lambda v: jnp.sum(call(v) ** 3)

    @jax.jit
    def derivatives(v):
        return jax.jacfwd(call)(v), jax.jacrev(call)(v), jax.hessian(cost)(v)

    @jax.jit
    def both_ways(steps):
        return jax.vmap(lambda d: (call(v + d), jax.grad(cost)(v + d)))(steps)

    forward, reverse, hessian = derivatives(v)
    np.testing.assert_allclose(forward, reverse, atol=1e-13)
    steps = step * np.eye(v.size).reshape(v.size, *shape)
    values, gradients = (
        (ahead - behind).reshape(v.size, -1) / (2 * step)
        for ahead, behind in zip(both_ways(steps), both_ways(-steps), strict=True)
    )
    np.testing.assert_allclose(forward.reshape(-1, v.size), values.T, atol=1e-7)
    np.testing.assert_allclose(hessian.reshape(v.size, v.size), gradients, atol=1e-6)


def test_several_blocks_have_second_derivatives(x64):
    v = normal(90, 80)
    direction = normal(90, 80, seed=1)
    cost = lambda v: jnp.sum(jnp.sin(cwy_matrix(v)) + cwy_multiply(v, jnp.ones(90)))

    def slope(v):
        return jax.jvp(jax.grad(cost), (v,), (direction,))[1]

    step = 1e-5
    gradient = jax.jit(jax.grad(cost))
    quotient = (gradient(v + step * direction) - gradient(v - step * direction)) / (2 * step)
    np.testing.assert_allclose(jax.jit(slope)(v), quotient, atol=1e-6)


def test_batches_and_transformations_agree(x64):
    v, x = normal(3, 6, 4), normal(3, 6, seed=1)
    cost = lambda v, x: jnp.sum(jnp.cos(cwy_matrix(v))) + jnp.sum(cwy_multiply(v, x) ** 3)
    batched = jax.jit(jax.grad(lambda v: cost(v, x)))(v)
    mapped = jax.jit(jax.vmap(jax.grad(cost)))(v, x)
    np.testing.assert_allclose(mapped, batched, atol=1e-13)
    kept = jax.jit(jax.grad(jax.checkpoint(lambda v: cost(v, x))))(v)
    np.testing.assert_allclose(kept, batched, atol=1e-13)

    def scanned(v):
        return jax.lax.scan(lambda total, one: (total + cost(*one), None), 0.0, (v, x))[0]

    np.testing.assert_allclose(jax.jit(jax.grad(scanned))(v), batched, atol=1e-13)
    # Reverse over reverse is forward over reverse.
    along = lambda v: jnp.vdot(jax.grad(lambda v: cost(v, x))(v), v)
    twice = jax.jit(jax.grad(along))(v) - batched
    mixed = jax.jit(lambda v: jax.jvp(jax.grad(lambda v: cost(v, x)), (v,), (v,))[1])(v)
    np.testing.assert_allclose(twice, mixed, atol=1e-11)


def recurrence(v, x, h0, bias, **options):
    states, last = rollout(x, h0, cwy_matrix(v), bias, "modrelu", unroll=1, **options)
    return jnp.sum(states**3) + jnp.sum(last)


def inputs():
    return normal(4, 4), normal(5, 2, 4, seed=1), normal(2, 4, seed=2), 0.1 * normal(4, seed=3)


@pytest.mark.slow
def test_rollout_derivatives(x64):
    given = inputs()
    every = tuple(range(4))
    adjoint = jax.jit(jax.grad(recurrence, every))(*given)
    plain = lambda *given: recurrence(*given, forward_mode=True)
    for found in (
        jax.jit(jax.grad(plain, every))(*given),
        jax.jit(jax.jacfwd(plain, every))(*given),
        jax.jit(jax.grad(jax.checkpoint(recurrence), every))(*given),
        jax.jit(jax.vmap(jax.grad(recurrence, every), (None, None, None, 0)))(
            *given[:3], given[3][None]
        ),
    ):
        for one, expected in zip(found, adjoint, strict=True):
            np.testing.assert_allclose(one.reshape(expected.shape), expected, atol=1e-12)
    # Second derivatives: reverse over reverse, and forward over reverse.
    hessian = jax.jit(jax.hessian(plain))(*given)
    for outer in (jax.jacrev, jax.jacfwd):
        found = jax.jit(outer(jax.grad(recurrence)))(*given)
        np.testing.assert_allclose(found, hessian, atol=1e-10)
    # Mixed ones, too, with respect to arguments that the gradient leaves alone.
    expected = jax.jit(jax.jacfwd(jax.grad(plain), 1))(*given)
    for outer in (jax.jacrev, jax.jacfwd):
        found = jax.jit(outer(jax.grad(recurrence), 1))(*given)
        np.testing.assert_allclose(found, expected, atol=1e-10)


@pytest.mark.parametrize("nonlinearity", list(NONLINEARITIES))
def test_both_modes_have_one_derivative_at_zero(nonlinearity, x64):
    x = np.zeros((2, 3, 4))
    h0 = np.zeros((3, 4))

    def cost(x, **options):
        return rollout(x, h0, np.eye(4), nonlinearity=nonlinearity, **options)[0].sum()

    adjoint = jax.grad(cost)(x)
    np.testing.assert_array_equal(jax.grad(partial(cost, forward_mode=True))(x), adjoint)


def test_forward_mode_names_its_option():
    given = [a.astype("float32") for a in inputs()]
    for call in (recurrence, jax.jit(recurrence)):
        with pytest.raises(TypeError, match="forward_mode=True"):
            jax.jvp(call, given, given)
        with pytest.raises(TypeError, match="forward_mode=True"):
            jax.jacfwd(call)(*given)
        with pytest.raises(TypeError, match="forward_mode=True"):
            jax.jit(jax.jacfwd(call))(*given)
    with pytest.raises(ValueError, match="no derivative"):
        jax.grad(lambda q: householder_vectors(q)[0].sum())(np.eye(3, dtype="float32"))
    stopped = lambda q: householder_vectors(jax.lax.stop_gradient(q))[0].sum()
    assert not jax.grad(stopped)(np.eye(3, dtype="float32")).any()


def programs(n, size):
    """Every function with its derivatives, as programs, at the lowest default precision."""
    v, x = np.ones((n, size), "float32"), np.ones((2, n), "float32")
    steps = np.ones((6, 2, n), "float32")
    calls = {
        "cwy_matrix": lambda v, x: cwy_matrix(v),
        "tcwy_matrix": lambda v, x: tcwy_matrix(v[:, :n]),
        "cwy_multiply": lambda v, x: cwy_multiply(v, x),
        "by factors": lambda v, x: cwy_multiply(wy_factors(v), x),
        "rollout": lambda v, x: rollout(steps, x, wy_factors(v), weight=jnp.eye(n))[0],
    }
    with jax.default_matmul_precision("bfloat16"):
        for call in calls.values():
            yield jax.make_jaxpr(lambda v, x, call=call: call(v, x))(v, x)
            yield jax.make_jaxpr(jax.grad(lambda v, x, call=call: call(v, x).sum(), (0, 1)))(v, x)
        for name in ("cwy_matrix", "tcwy_matrix", "cwy_multiply", "by factors"):
            yield jax.make_jaxpr(lambda v, x, name=name: jax.jvp(calls[name], (v, x), (v, x)))(v, x)


@pytest.mark.parametrize(("n", "size"), [(8, 3), (70, 70), (40, 100)])
def test_every_product_has_the_highest_precision(n, size):
    highest = (jax.lax.Precision.HIGHEST,) * 2
    found = 0
    for program in programs(n, size):
        for equation in equations(program.jaxpr):
            if equation.primitive.name == "dot_general":
                assert equation.params["precision"] == highest
                found += 1
    assert found > 100


def test_the_compiled_program_has_it_too():
    with jax.default_matmul_precision("bfloat16"):
        text = jax.jit(jax.grad(lambda v: cwy_matrix(v).sum())).lower(np.ones((9, 9))).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert products
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


def test_one_product_gives_the_gradient_of_the_transition():
    steps, batch, n = 7, 2, 5
    given = np.ones((steps, batch, n)), np.ones((batch, n)), np.eye(n)
    cost = lambda x, h0, q: rollout(x, h0, q, nonlinearity="tanh", unroll=1)[0].sum()
    program = jax.make_jaxpr(jax.grad(cost, 2))(*given)
    loops = [e for e in equations(program.jaxpr) if e.primitive.name == "scan"]
    inside = [
        [e for e in equations(loop.params["jaxpr"].jaxpr) if e.primitive.name == "dot_general"]
        for loop in loops
    ]
    assert [len(products) for products in inside] == [1, 1]
    every = [e for e in equations(program.jaxpr) if e.primitive.name == "dot_general"]
    assert len(every) == 3
    (outside,) = [e for e in every if e.invars[0].aval.size == steps * batch * n]
    assert outside.outvars[0].aval.shape in ((n, n),)


def test_both_ways_invert():
    s = np.triu(family("non-negative", 37, 37), 1) * 0.1 + np.eye(37, dtype="float32") / 2
    invert = jax.jit(lambda s: [triangular_inverse(s, way) for way in ("products", "solve")])
    for t in invert(s):
        np.testing.assert_allclose(np.asarray(t) @ s, np.eye(37), atol=1e-4)
