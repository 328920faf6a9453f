"""The functions of ``cwy.ops`` for JAX. They compose with its transformations, on any backend.

``import cwy.jax`` does not import torch.
"""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError(
        'cwy.jax needs JAX, which is not installed. Install it with `pip install "cwy[jax]"`, '
        'and `pip install "jax[cuda13]"` or `pip install "jax[tpu]"` for an accelerator.'
    ) from error

from . import init
from .inverse import householder_vectors
from .recurrence import rollout
from .wy import WY, cwy_matrix, cwy_multiply, tcwy_matrix, wy_factors

__all__ = [
    "WY",
    "cwy_matrix",
    "cwy_multiply",
    "householder_vectors",
    "init",
    "rollout",
    "tcwy_matrix",
    "wy_factors",
]
