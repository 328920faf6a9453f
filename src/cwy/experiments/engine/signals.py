"""Signals that stop a run, and output streams that may close during it.

SIGTERM, Ctrl-C and a closed terminal (SIGHUP) ask to stop. A second signal ends at once.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select
from types import FrameType
from typing import Any

from ...terminal import complaint

HANGUP = getattr(signal, "SIGHUP", None)
"""Windows has none."""


def status(number: int) -> int:
    """Return the exit status of what a signal ended, as a shell counts it.

    Example:
        >>> status(15)
        143
    """
    return 128 + number


class Interrupted(Exception):
    """Report that a signal ended an evaluation, which will come again."""


class Stopped(Exception):
    """Report that a signal stopped the run. Everything is saved."""

    def __init__(self, signal: int, where: str, folder: Path) -> None:
        super().__init__(f"stopped {where}. To go on: cwy resume {folder}")
        self.status = status(signal)


class Stop:
    """Remember, while entered, the signal that asked to stop.

    A signal that is ignored, as SIGHUP below ``nohup``, stays ignored. Nothing is raised where a
    signal happens to come: inside an import or a callback Python drops or replaces an error.

    Attributes:
        signal: its number, 0 if none came.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._leave: Callable[[], str] | None = None

    @contextmanager
    def ending(self, leave: Callable[[], str]) -> Generator[None]:
        """End the process at once if a signal comes or has come, because nothing must be saved.

        Args:
            leave: does what is still to be done, and returns the message to print.
        """
        self._leave = leave
        try:
            self._end()
            yield
        finally:
            self._leave = None

    def heed(self) -> None:
        """Raise :class:`Interrupted` if a signal has come."""
        if self.signal:
            raise Interrupted

    def __enter__(self) -> Stop:
        heard = [number for number in (signal.SIGTERM, signal.SIGINT, HANGUP) if number is not None]
        before = {number: signal.getsignal(number) for number in heard}
        self._before = {
            number: handler for number, handler in before.items() if handler is not signal.SIG_IGN
        }
        for number in self._before:
            signal.signal(number, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == HANGUP:
            return  # a shell and its terminal both report one end
        if self.signal:
            os._exit(status(number))
        self.signal = number
        self._end()

    def _end(self) -> None:
        if self.signal and self._leave is not None:
            try:
                print_error(self._leave())
            finally:
                os._exit(status(self.signal))


class _Lasting(io.FileIO):
    """Drop what cannot be written, as when ``head`` has read enough or the terminal is gone."""

    reported = False

    def write(self, data: Any) -> int | None:
        try:
            while (written := super().write(data)) is None:
                select([], [self], [])  # a non-blocking pipe is full
            return written
        except OSError as error:
            if not self.reported and self.fileno() == 1:
                print_error(f"cannot print any more ({error.strerror}). The run goes on without.")
            self.reported = True
            return len(data)


def print_error(line: str) -> None:
    """Print a line on standard error without ``sys.stderr``.

    That stream may be inside a write, or lead to standard output while a bar is shown.
    """
    if sys.stderr is not None:
        with suppress(OSError):
            os.write(2, f"{complaint(f'cwy: {line}')}\n".encode(errors="replace"))


def outlast() -> None:
    """Make printing never fail from here on."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            continue
        options = {key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering")}
        raw = _Lasting(stream.fileno(), "w", closefd=False)
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), **options))
