"""Manifolds that parameters may live on: metrics, tangent vectors, retractions. Plain functions on tensors."""

from . import stiefel

__all__ = ["stiefel"]
