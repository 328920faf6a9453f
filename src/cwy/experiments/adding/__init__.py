"""The adding problem: the sum of two marked numbers of a long sequence."""

from .task import Adding

TASKS = (Adding,)
