"""Arrays for both libraries, and what a JAX program consists of."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import jaxprs_in_params

from tests.helpers.families import departure, vectors


def normal(*shape, dtype="float64", seed=0):
    """A numpy array of standard normal entries."""
    rng = np.random.default_rng([seed, *shape])
    found = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        found = found + 1j * rng.standard_normal(shape)
    return found.astype(dtype)


def family(name, n, size, dtype="float32", seed=0):
    """Hard reflection vectors as a numpy array."""
    return vectors(name, n, size, getattr(torch, dtype), seed).numpy()


def departure_of(q):
    """The spectral norm of QᴴQ − I."""
    return departure(torch.from_numpy(np.array(q)))


def torch_value_and_gradients(call, inputs, cotangents):
    """The results of torch, then the gradients of the inputs."""
    leaves = [torch.from_numpy(x.copy()).requires_grad_() for x in inputs]
    outs = call(*leaves)
    gradients = torch.autograd.grad(outs, leaves, [torch.from_numpy(z) for z in cotangents])
    return [x.detach().resolve_conj().numpy() for x in (*outs, *gradients)]


def jax_value_and_gradients(call, inputs, cotangents):
    """The same by JAX, whose gradients are the conjugates of torch's."""

    @jax.jit
    def run(inputs, cotangents):
        outs, pull = jax.vjp(call, *inputs)
        gradients = pull([z.conj() for z in cotangents])
        return [*outs, *(g.conj() for g in gradients)]

    found = run([jnp.asarray(x) for x in inputs], [jnp.asarray(z) for z in cotangents])
    return [np.asarray(x) for x in found]


def assert_close(found, expected, bound):
    """Assert that arrays agree to within a bound, relative to the largest entry."""
    for f, e in zip(found, expected, strict=True):
        assert f.shape == e.shape
        assert f.dtype == e.dtype
        assert np.abs(f - e).max(initial=0) <= bound * max(1.0, np.abs(e).max(initial=0))


def equations(jaxpr):
    """Every equation of a program, those of inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)
