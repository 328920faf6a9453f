"""Tatoeba's Spanish–English pairs, as text."""

from __future__ import annotations

from pathlib import Path

from .fetch import ensure
from .sets import TATOEBA
from .unpack import member


def load(root: Path | None = None) -> bytes:
    """A pair a line, English, a tab, Spanish; checked by hash, fetched if it is not there.

    Args:
        root: the folder that holds ``tatoeba/``; by default ``$CWY_DATA``, or ``cwy`` in the user's cache folder.
    """
    (file,) = TATOEBA.files
    assert file.inside
    return member(ensure(TATOEBA, root) / file.name, file.inside, file.size)
