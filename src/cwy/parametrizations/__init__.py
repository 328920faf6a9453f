"""One file = one map from free parameters to O(N), U(N) or St(N, M)."""

from ..registry import METHODS
from .base import OrthogonalMap

# METHODS keeps the order of these imports: the paper's own first, then its rivals.
# isort: off
from .cwy import CWY
from .hr import HR
from .tcwy import TCWY
from .eurnn import EURNN
from .exprnn import EXPRNN
from .dtriv import DTRIV, move_bases
from .own import OWN
from .rgd import RGD, RGDCQR, RGDEC, RGDEQR, RGDAdam
from .scornn import SCORNN
from .urnn import URNN
# isort: on

__all__ = [
    "CWY",
    "DTRIV",
    "EURNN",
    "EXPRNN",
    "HR",
    "METHODS",
    "OWN",
    "RGD",
    "RGDCQR",
    "RGDEC",
    "RGDEQR",
    "SCORNN",
    "TCWY",
    "URNN",
    "OrthogonalMap",
    "RGDAdam",
    "move_bases",
]
