"""Standard output and error that may close while a run goes on."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from select import select
from typing import Any

from ...terminal import complaint


class _Lasting(io.FileIO):
    """Drops what can't be written: nobody reads it any more, as when ``head`` has seen enough or the terminal is gone."""

    told = False

    def write(self, data: Any) -> int | None:
        try:
            while (written := super().write(data)) is None:
                select([], [self], [])  # of a pipe that is full and does not wait
            return written
        except OSError as error:
            if not self.told and self.fileno() == 1:
                tell(f"cannot print any more ({error.strerror}); the run goes on without.")
            self.told = True
            return len(data)


def tell(line: str) -> None:
    """A line on standard error, past ``sys.stderr``: that may be amid a write, or lead to standard output, as beside a bar."""
    if sys.stderr is not None:
        with suppress(OSError):
            os.write(2, f"{complaint(f'cwy: {line}')}\n".encode(errors="replace"))


def outlast() -> None:
    """From here on printing never fails."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:
            options = {
                key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering")
            }
            raw = _Lasting(stream.fileno(), "w", closefd=False)
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), **options))
