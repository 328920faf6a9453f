"""Maps from skew-symmetric to orthogonal matrices, and the logarithm back.

Each map is one ``torch.library`` op that holds full precision forward and backward, compiled or
not. Under ``torch.func``, which differentiates only ATen ops, it is the ATen function itself.
"""

from .cayley import cayley
from .exponential import matrix_exp, polished, rotation
from .logarithm import logarithm

__all__ = ["cayley", "logarithm", "matrix_exp", "polished", "rotation"]
