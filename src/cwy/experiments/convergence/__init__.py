"""Theorem 4, observed: SGD through CWY and T-CWY approaches a stationary point."""

from .task import Convergence

TASKS = (Convergence,)
