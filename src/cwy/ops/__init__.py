"""Pure tensor functions, no state. Every one takes leading batch dimensions, real or complex."""

from . import skew as skew  # registers its ops, for exported programs
from .recurrence import conv_rollout, rollout
from .reflect import reflect
from .wy import WY, cwy_matrix, cwy_multiply, householder_vectors, tcwy_matrix, wy_factors

__all__ = [
    "WY",
    "conv_rollout",
    "cwy_matrix",
    "cwy_multiply",
    "householder_vectors",
    "reflect",
    "rollout",
    "tcwy_matrix",
    "wy_factors",
]
