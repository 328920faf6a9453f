"""Layers: recurrent networks with orthogonal transitions, of vectors and of images."""

from .activations import ModReLU
from .conv import ConvNERU, ConvNERUCell
from .convlstm import ConvLSTM, ConvLSTMCell
from .rnn import OrthogonalRNN, OrthogonalRNNCell

__all__ = [
    "ConvLSTM",
    "ConvLSTMCell",
    "ConvNERU",
    "ConvNERUCell",
    "ModReLU",
    "OrthogonalRNN",
    "OrthogonalRNNCell",
]
