"""Optimizers for weights on the Stiefel manifold, with the interface of torch's own."""

from .adam import StiefelAdam
from .hold import hold_length
from .joint import Joint
from .model import for_model
from .sgd import StiefelSGD

__all__ = ["Joint", "StiefelAdam", "StiefelSGD", "for_model", "hold_length"]
