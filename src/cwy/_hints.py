"""Suggest the nearest known name in an error about an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str], *, count: int = 2, cutoff: float = 0.5) -> str:
    """Return "Did you mean 'a' or 'b'?" for the names nearest to ``name``, or an empty string.

    Example:
        >>> did_you_mean("cyw", ["cwy", "tcwy", "rgd"])
        "Did you mean 'cwy' or 'tcwy'?"
        >>> did_you_mean("cyw", ["rgd"])
        ''
    """
    near = difflib.get_close_matches(str(name).lower(), list(known), n=count, cutoff=cutoff)
    if not near:
        return ""
    quoted = [repr(match) for match in near]
    return f"Did you mean {' or '.join(quoted)}?"
