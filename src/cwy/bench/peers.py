"""Which packages take part: those named by ``--peers``, of those that are installed."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from importlib.util import find_spec

INSTALL = 'pip install "cwy[peers]"'
PEERS = ("torch", "geotorch", "geoopt", "torch_householder")
"""The packages that entries of group "peer" may need."""


def choose(option: str, text: str, known: Sequence[str]) -> set[str]:
    """The names that an option such as ``--peers`` selects: "all", "none", or some of those known.

    Example:
        >>> sorted(choose("--peers", "torch, geoopt", PEERS))
        ['geoopt', 'torch']
    """
    asked = {name.strip() for name in text.split(",") if name.strip()}
    if asked == {"all"}:
        return set(known)
    if asked == {"none"}:
        return set()
    for name in sorted(asked - set(known)):
        raise ValueError(f"{option}: {name!r} is not known. {near(name, [*known, 'all', 'none'])}")
    if not asked:
        raise ValueError(f"{option} names nothing. Known: {', '.join(known)}, all, none.")
    return asked


def near(name: str, known: Collection[str]) -> str:
    """A hint: the known names most like this one, and all of them."""
    close = difflib.get_close_matches(name, known, n=2)
    hint = f"Did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{hint}Known: {', '.join(known)}."


def why_missing(package: str) -> str | None:
    """How to install a package that is not there; None if it is."""
    return None if find_spec(package) else f"{package} is not installed: {INSTALL}"
