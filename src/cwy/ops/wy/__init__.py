"""Products of Householder reflections by the compact WY transform: factors, matrix, multiplication, inverse map."""

from .functions import WY, cwy_matrix, cwy_multiply, tcwy_matrix, wy_factors
from .inverse import householder_vectors

__all__ = ["WY", "cwy_matrix", "cwy_multiply", "householder_vectors", "tcwy_matrix", "wy_factors"]
