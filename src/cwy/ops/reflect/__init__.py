"""Reflections of activations: an orthogonal matrix applied to x in the dtype of x."""

from .reflect import reflect

__all__ = ["reflect"]
