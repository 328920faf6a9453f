"""The Copying task: remember ten symbols over T steps."""

from .task import Copying

TASKS = (Copying,)
