"""Functions that all commands share.

Commands report mistakes in one line, try folders first, and go on when nobody reads
their output any more.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def steady() -> Console:
    """Return a console for long work, which continues when nobody reads it, as after ``| head``."""
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
    return "".join(_spelled(character, keep) for character in str(text))


def _spelled(character: str, keep: str) -> str:
    if character.isprintable() or character in keep:
        return character
    return ascii(character)[1:-1]


def fold(text: str, width: int | None) -> str:
    """Break lines that are wider than a terminal, and give a command a line of its own.

    Lines break between words. Those that begin with a space, such as code, stay as they are.
    All lines stay if no width is given, or one below 2. Some terminals report 0 columns.

    Example:
        >>> print(fold("stopped, and saved. To go on: cwy resume runs/copying/1000-cwy-seed0", 40))
        stopped, and saved. To go on:
            cwy resume runs/copying/1000-cwy-seed0
    """
    if width is None or width < 2:
        return text
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) < width or line.startswith(" "):
            lines.append(line)
            continue
        sentence, *command = re.split(r"(?<=:) (?=cwy [^:]*$)", line)
        lines += textwrap.wrap(sentence, width - 1, break_long_words=False, break_on_hyphens=False)
        lines += [f"    {part}" for part in command]
    return "\n".join(lines)


def complaint(text: str) -> str:
    """Return a message for standard error, folded where that is a terminal."""
    width = None
    with suppress(OSError):
        width = os.get_terminal_size(2).columns
    return fold(text, width)


@contextmanager
def plainly(error: type[Exception], what: str = "") -> Generator[None]:
    """End the command with one line, not a traceback, where the user can mend such an error."""
    try:
        yield
    except error as mistake:
        reason = getattr(mistake, "strerror", None) or mistake
        sys.exit(printable(f"cwy: {what}{reason}", keep="\n"))


def writable(folder: Path) -> Path:
    """Return the folder, created if missing, or raise if nothing can be written there."""
    from tempfile import TemporaryFile

    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=folder):
        return folder
