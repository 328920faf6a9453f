"""One file = one map from free parameters to O(N), U(N) or St(N, M)."""

from ..registry import METHODS
from .base import OrthogonalMap
from .cwy import CWY
from .hr import HR
from .tcwy import TCWY

# isort: split
# METHODS keeps the order of these imports: the paper's own first, then its rivals.
from .eurnn import EURNN
from .exponential import DTRIV, EXPRNN, move_bases
from .own import OWN
from .rgd import RGD, RGDCQR, RGDEC, RGDEQR, RGDAdam
from .scornn import SCORNN
from .urnn import URNN

__all__ = [
    "CWY", "DTRIV", "EURNN", "EXPRNN", "HR", "METHODS", "OWN", "RGD", "RGDCQR", "RGDEC", "RGDEQR", "SCORNN", "TCWY", "URNN",
    "OrthogonalMap", "RGDAdam", "move_bases",
]  # fmt: skip
