"""The files of a run: read with suspicion, written whole, and never through a link."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

from ... import _atomic

LONGEST_JSON = 64 << 20
"""The most bytes that a JSON file of a run may have."""
LONGEST_SLUG = 80

_APPEND = _atomic.NO_LINKS | os.O_APPEND


class Damaged(ValueError):
    """Report a file whose content is not what was written. The message names it."""


def slug(text: str) -> str:
    """Return a name of letters, digits and hyphens, for files and links. No text leads elsewhere.

    Example:
        >>> slug("copying-T1000"), slug("../../elsewhere"), slug("\\0")
        ('copying-T1000', 'elsewhere', 'unnamed')
    """
    plain = re.sub(r"[^A-Za-z0-9]+", "-", text)
    return plain[:LONGEST_SLUG].strip("-") or "unnamed"


def append_to(path: Path) -> BinaryIO:
    """Open an existing file to add to its end. A link raises ``OSError``."""
    return os.fdopen(os.open(path, _APPEND), "ab")


def refuse_link(path: Path) -> None:
    """Raise if a link lies at a path where a run would write a folder of its own."""
    if path.is_symlink():
        raise Damaged(f"{path} is a link: a run writes only into its own folder. Delete the link.")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a dictionary as JSON."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    _atomic.write(path, f"{text}\n".encode())


def read(path: Path, longest: int | None = None) -> bytes:
    """Read a regular file. Anything else there, or more bytes than ``longest``, is damage."""
    found = path.stat()
    # A folder raises below. A pipe or a device would be read for ever.
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise Damaged(f"{path} is damaged: it is no regular file.")
    if longest is not None and found.st_size > longest:
        raise Damaged(f"{path} is damaged: it has {found.st_size:,} bytes, above {longest:,}.")
    return path.read_bytes()


def read_json(path: Path) -> dict[str, Any]:
    """Return what :func:`write_json` wrote."""
    content = read(path, LONGEST_JSON)
    try:
        found = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise Damaged(f"{path} is damaged: its brackets are nested too deep.") from None
    except ValueError as error:
        raise Damaged(f"{path} is damaged: {error}.") from None
    if not isinstance(found, dict):
        raise Damaged(f"{path} is damaged: it holds no JSON object.")
    return found
