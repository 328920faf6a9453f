"""Manifolds of parameters: metrics, tangent vectors and retractions, as functions of tensors."""

from . import stiefel

__all__ = ["stiefel"]
