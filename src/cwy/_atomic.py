"""Write files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

# Windows has no O_NOFOLLOW. There O_EXCL refuses a link at the name of a new file.
NO_LINKS = os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_CREATE = NO_LINKS | os.O_CREAT | os.O_EXCL


def write(path: Path, content: bytes, *, shared: bool = False) -> None:
    """Write to a temporary name, flush to the disk and rename.

    A kill at any moment leaves the old file or the new one. A link at either name is replaced.
    The file that the link leads to stays as it is.

    Args:
        path: the file.
        content: all of its bytes.
        shared: whether several processes may write the file at the same time. Each of them then
            has a temporary name of its own.
    """
    name = path.name
    if shared:
        name = f"{name}.{secrets.token_hex(4)}"
    with (
        _renamed(path.with_name(f".{name}.partial"), path) as partial,
        os.fdopen(os.open(partial, _CREATE, 0o666), "wb") as file,
    ):
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def whole(path: Path) -> Generator[Path]:
    """Yield a temporary name to write a file by, and rename the file once it is complete."""
    with _renamed(path.with_name(f".{path.name}.partial"), path) as partial:
        yield partial


def publish(partial: Path, path: Path) -> None:
    """Give a complete file its name, and flush the rename to the disk."""
    os.replace(partial, path)
    # The rename itself reaches the disk with the folder. Windows opens no folders.
    if sys.platform == "win32":
        return
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _renamed(partial: Path, path: Path) -> Generator[Path]:
    # An attempt that was killed may have left it, or somebody a link to write through.
    partial.unlink(missing_ok=True)
    try:
        yield partial
        publish(partial, path)
    finally:
        partial.unlink(missing_ok=True)
