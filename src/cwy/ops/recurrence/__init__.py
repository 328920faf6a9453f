"""The ops ``rollout`` and ``conv_rollout``: a whole recurrence over time."""

from .convolution import conv_rollout
from .functions import rollout

__all__ = ["conv_rollout", "rollout"]
