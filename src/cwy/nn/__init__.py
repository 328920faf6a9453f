"""Layers: recurrent networks with orthogonal transitions."""

from .activations import ModReLU
from .rnn import OrthogonalRNN, OrthogonalRNNCell

__all__ = ["ModReLU", "OrthogonalRNN", "OrthogonalRNNCell"]
