"""Find the folders of data sets and of what is made of them: those that the user names, or a cache.

The page "Cache folders and downloads" of the decisions explains why the library's own cache of
kernels does without platformdirs.
"""

from __future__ import annotations

import os
from pathlib import Path


def default_root() -> Path:
    """Return the folder of all data sets: ``$CWY_DATA``, or ``cwy`` in the user's cache folder."""
    named = os.environ.get("CWY_DATA")
    if named:
        return Path(named)
    return _cache()


def frames_root() -> Path:
    """Return the folder of decoded videos: ``$CWY_FRAMES``, or ``cwy/frames`` in the cache."""
    named = os.environ.get("CWY_FRAMES")
    if named:
        return Path(named)
    return _cache() / "frames"


def tokens_root() -> Path:
    """Return the folder of tokenized sentences: ``cwy/tokens`` in the user's cache folder."""
    return _cache() / "tokens"


def _cache() -> Path:
    """Return the folder of cwy in the user's cache folder."""
    # Version 0.1 kept it here on every system. On Linux both names are the same.
    earlier = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cwy"
    if earlier.is_dir():
        return earlier
    from platformdirs import user_cache_path

    return user_cache_path("cwy", appauthor=False)
