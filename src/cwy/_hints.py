"""Suggest the nearest known name in an error about an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str], *, count: int = 2, cutoff: float = 0.5) -> str:
    """Return "Did you mean 'a' or 'b'?" for the names nearest to ``name``, or an empty string.

    Args:
        name: the unknown name. Its case does not count.
        known: the names to choose from.
        count: the most names to suggest.
        cutoff: how alike a name must be to be suggested, from 0 to 1.

    Example:
        >>> did_you_mean("cyw", ["cwy", "tcwy", "rgd"])
        "Did you mean 'cwy' or 'tcwy'?"
        >>> did_you_mean("cyw", ["rgd"])
        ''
    """
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(str(name).lower(), by_lower, n=count, cutoff=cutoff)
    return suggest(by_lower[match] for match in near)


def suggest(names: Iterable[str]) -> str:
    """Return "Did you mean 'a' or 'b'?" for these names, or an empty string without any."""
    quoted = [repr(name) for name in names]
    if not quoted:
        return ""
    return f"Did you mean {' or '.join(quoted)}?"


def sentences(*parts: str) -> str:
    """Join the sentences of a message with spaces, and skip those that are empty.

    Example:
        >>> sentences("unknown method 'x'.", did_you_mean("x", ["cwy"]), "Known: cwy.")
        "unknown method 'x'. Known: cwy."
    """
    return " ".join(part for part in parts if part)
