"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from pathlib import Path
from typing import Any, BinaryIO

LONGEST_JSON = 64 << 20
"""The most bytes that a JSON file of a run may have."""
LONGEST_SLUG = 80

# Windows has no O_NOFOLLOW. There O_EXCL refuses a link at the name of a new file.
_PLAINLY = os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_CREATE = _PLAINLY | os.O_CREAT | os.O_EXCL
_APPEND = _PLAINLY | os.O_APPEND


class Damaged(ValueError):
    """A file whose content is not what was written; the message names it."""


def write(path: Path, content: bytes) -> None:
    """Write to a temporary name, flush to the disk and rename.

    A kill at any moment leaves the old file or the new one. A link at either name is replaced,
    and what it leads to is left as it is.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(partial, _CREATE, 0o666), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def slug(text: str) -> str:
    """Return a name of letters, digits and hyphens, for files and links; no text leads elsewhere.

    Example:
        >>> slug("copying-T1000"), slug("../../elsewhere"), slug("\\0")
        ('copying-T1000', 'elsewhere', 'unnamed')
    """
    plain = re.sub(r"[^A-Za-z0-9]+", "-", text)
    return plain[:LONGEST_SLUG].strip("-") or "unnamed"


def append_to(path: Path) -> BinaryIO:
    """Open a file that is there to add to its end; a link raises ``OSError``."""
    return os.fdopen(os.open(path, _APPEND), "ab")


def refuse_link(path: Path) -> None:
    """Raise if a link lies at a path where a run would write a folder of its own."""
    if path.is_symlink():
        raise Damaged(f"{path} is a link: a run writes only into its own folder. Delete the link.")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """A dictionary as JSON, as :func:`write` writes."""
    write(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def read(path: Path, longest: int | None = None) -> bytes:
    """Read a regular file; anything else there, or more bytes than ``longest``, is damage."""
    found = path.stat()
    # A folder raises below. A pipe or a device would be read for ever.
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise Damaged(f"{path} is damaged: it is no regular file.")
    if longest is not None and found.st_size > longest:
        raise Damaged(f"{path} is damaged: it has {found.st_size:,} bytes, above {longest:,}.")
    return path.read_bytes()


def read_json(path: Path) -> dict[str, Any]:
    """What :func:`write_json` wrote."""
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


def _flush_folder(folder: Path) -> None:
    # The rename itself reaches the disk with the folder. Windows opens no folders.
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
