"""Where JAX is missing, its tests are skipped. On a GPU it leaves memory to torch."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import pytest

jax = pytest.importorskip("jax")

# The tests compile many small programs and run each once.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def x64():
    """float64 and complex128, which JAX has only on request."""
    with jax.enable_x64(True):
        yield
