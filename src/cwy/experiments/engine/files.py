"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Damaged(ValueError):
    """A file whose content is not what was written; the message names it."""


def write(path: Path, content: bytes) -> None:
    """Writes to a temporary name, flushes to the disk and renames: a kill at any moment leaves the old file or the new."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """A dictionary as JSON, as :func:`write` writes."""
    write(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """What :func:`write_json` wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Damaged(f"{path} is damaged: {error}.") from None
    if not isinstance(content, dict):
        raise Damaged(f"{path} is damaged: it holds no JSON object.")
    return content


def _flush_folder(folder: Path) -> None:
    # The rename itself reaches the disk with the folder.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
