"""Retrieval across languages: adapt an English sentence encoder to Spanish questions."""

from .task import Retrieval

TASKS = (Retrieval,)
