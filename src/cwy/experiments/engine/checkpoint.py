"""Checkpoints: written whole, hashed, checked on reading; the last two are kept."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ... import _atomic
from . import files
from .files import Damaged

KEEP = 2
NAME = re.compile(r"step-[0-9]{8,12}\.pt")

LONGEST_HASH = 4096


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Writes ``step-<step>.pt`` and its sha256 beside it, then deletes all but the last two.

    A failure leaves the checkpoints before as they were.
    """
    files.refuse_link(folder)
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:08d}.pt"
    if path.exists():
        return path
    for left in folder.glob(".*.partial"):
        left.unlink()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    # The hash first: then a checkpoint that is there has one.
    _atomic.write(_hash_of(path), f"{hashlib.sha256(content).hexdigest()}  {path.name}\n".encode())
    _atomic.write(path, content)
    for old in listed(folder)[KEEP:]:
        old.unlink()
        _hash_of(old).unlink(missing_ok=True)
    return path


def read(path: Path) -> bytes:
    """The bytes of a checkpoint, checked against its hash."""
    try:
        expected = files.read(_hash_of(path), LONGEST_HASH).decode("ascii", "replace").split()[0]
    except (FileNotFoundError, IndexError):
        raise Damaged(f"{path} is damaged: its hash {_hash_of(path).name} is missing.") from None
    content = files.read(path)
    if hashlib.sha256(content).hexdigest() != expected:
        raise Damaged(f"{path} is damaged: its bytes are not those of its sha256.")
    return content


def parse(content: bytes) -> dict[str, Any]:
    """Read the state in a checkpoint's bytes: tensors and plain values only, all else is damage."""
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        # Bytes with the right hash may still be anybody's, and torch raises whatever it meets.
        raise Damaged(
            f"a checkpoint can't be read, though its hash is right: {type(error).__name__}."
        ) from error
    if not isinstance(state, dict):
        raise Damaged("a checkpoint holds no state, though its hash is right.")
    return state


def last(folder: Path, say: Callable[[str], object]) -> bytes:
    """The newest checkpoint that is whole, empty where there is none; damaged ones are named by ``say``.

    Where there are checkpoints but none is whole, it raises: nothing is started again silently.
    """
    files.refuse_link(folder)
    paths = listed(folder)
    for path in paths:
        try:
            content = read(path)
        except Damaged as damage:
            say(f"{damage} Trying the one before.")
        else:
            # What can't be read is not kept as one of the last two.
            for damaged in paths[: paths.index(path)]:
                damaged.rename(damaged.with_suffix(".damaged"))
            return content
    if paths:
        raise Damaged(
            f"no checkpoint in {folder} is whole. To start the run again, delete that folder."
        )
    return b""


def listed(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first."""
    named = (path for path in folder.glob("step-*.pt") if NAME.fullmatch(path.name))
    return sorted(named, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.stem.removeprefix("step-"))


def _hash_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")
