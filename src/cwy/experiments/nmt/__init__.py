"""Translation from Spanish to English, or between the columns of any file."""

from .task import Translation

TASKS = (Translation,)
