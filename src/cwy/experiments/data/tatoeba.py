"""Tatoeba's Spanish–English pairs, as text."""

from __future__ import annotations

from pathlib import Path

from .fetch import ensure
from .sets import TATOEBA
from .unpack import member


def load(root: Path | None = None) -> bytes:
    """Return lines of English, a tab, Spanish. They are checked by hash, and fetched if missing.

    Args:
        root: the folder that holds ``tatoeba/``, by default :func:`~.folders.default_root`.
    """
    (file,) = TATOEBA.files
    assert file.inside
    return member(ensure(TATOEBA, root) / file.name, file.inside, file.size)
