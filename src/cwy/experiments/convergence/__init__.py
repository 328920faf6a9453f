"""Theorem 4, observed: stochastic gradient descent through CWY and T-CWY comes arbitrarily near to a stationary point."""

from .task import Convergence

TASKS = (Convergence,)
