"""Where JAX is missing, its tests are skipped. On a GPU it leaves memory to torch."""

import os
from importlib import metadata

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import pytest

jax = pytest.importorskip("jax")

# The tests compile many small programs and run each once.
jax.config.update("jax_disable_most_optimizations", True)
if metadata.version("jaxlib").startswith("0.10."):
    # This halves the time of compilation. Another jaxlib may not know the flag and would abort.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false"


@pytest.fixture
def x64():
    """float64 and complex128, which JAX has only on request."""
    with jax.enable_x64(True):
        yield
