"""One file = one map from free parameters to O(N), U(N) or St(N, M)."""

from ..registry import METHODS
from .base import OrthogonalMap
from .cwy import CWY
from .householder import HR
from .tcwy import TCWY

__all__ = ["CWY", "HR", "METHODS", "TCWY", "OrthogonalMap"]
