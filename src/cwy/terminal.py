"""What commands share: mistakes told in one line, folders tried before any work is done, work that outlives its reader."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def steady() -> Console:
    """A console for long work, which goes on when nobody reads any more, as after ``| head``."""
    from rich.console import Console

    class Steady(Console):
        def on_broken_pipe(self) -> None:
            with suppress(SystemExit):
                super().on_broken_pipe()  # turns stdout to nothing

    return Steady(highlight=False, markup=False)


def printable(text: object, keep: str = "") -> str:
    """Return a text in which escape codes and all else that a terminal would obey are spelled out.

    Args:
        text: what to print, often with names from files.
        keep: characters that stay, such as the ends of lines.

    Example:
        >>> printable("run\\x1b[2J")
        'run\\\\x1b[2J'
    """
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in str(text))


@contextmanager
def plainly(error: type[Exception], what: str = "") -> Generator[None]:
    """Ends the command with one line, not a traceback, where such an error is the user's to mend."""
    try:
        yield
    except error as mistake:
        told = getattr(mistake, "strerror", None) or mistake
        sys.exit(printable(f"cwy: {what}{told}", keep="\n"))


def writable(folder: Path) -> Path:
    """The folder, made if need be; raises before any work is done if nothing can be written there."""
    from tempfile import TemporaryFile

    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=folder):
        return folder


@contextmanager
def whole(path: Path) -> Generator[Path]:
    """Another name to write a file by; it takes the place of ``path`` once it is complete."""
    partial = path.with_name(f".{path.name}.partial")
    # Of an attempt that was ended, or a link that somebody put there to be written through.
    partial.unlink(missing_ok=True)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
