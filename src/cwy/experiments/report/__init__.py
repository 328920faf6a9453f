"""The report: run folders in, one page and its figures out. What is shown of a task is described next to the task."""

from .find import find_runs
from .runs import ReportError, Run, read_run
from .write import write

__all__ = ["ReportError", "Run", "find_runs", "read_run", "write"]
