"""The report: run folders in, one page and its figures out.

A task's own folder describes what is shown of it.
"""

from .find import find_runs
from .runs import ReportError, Run, read_run
from .write import write

__all__ = ["ReportError", "Run", "find_runs", "read_run", "write"]
