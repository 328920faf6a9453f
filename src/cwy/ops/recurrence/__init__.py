"""The op ``rollout``: a whole recurrence over time."""

from .functions import rollout

__all__ = ["rollout"]
