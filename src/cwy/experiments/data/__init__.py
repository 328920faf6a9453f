"""Data sets: fetched from their public homes, checked by hash, kept in one folder.

A set is one entry of DATASETS.
"""

from .fetch import DataError, DataSet, File, ensure, fetch, inspect
from .folders import default_root
from .sets import DATASETS, find

__all__ = [
    "DATASETS",
    "DataError",
    "DataSet",
    "File",
    "default_root",
    "ensure",
    "fetch",
    "find",
    "inspect",
]
