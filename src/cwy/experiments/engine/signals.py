"""SIGTERM, Ctrl-C and a closed terminal (SIGHUP): the first asks to stop, a second ends at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from .streams import tell

HANGUP = getattr(signal, "SIGHUP", None)
"""Windows has none."""


def status(number: int) -> int:
    """The exit status of what a signal ended, as in a shell: 143 for SIGTERM, 130 for Ctrl-C, 129 for SIGHUP."""
    return 128 + number


class Interrupted(Exception):
    """An evaluation is left, as a signal asked to stop; it will come again."""


class Stopped(Exception):
    """A signal asked the run to stop; all there was to save is saved."""

    def __init__(self, signal: int, where: str, folder: Path) -> None:
        super().__init__(f"stopped {where}. To go on: cwy resume {folder}")
        self.status = status(signal)


class Stop:
    """While entered, remembers the signal that asked to stop; one that is ignored, as SIGHUP below ``nohup``, stays ignored.

    Nothing is ever raised where a signal happens to come: amid an import or a callback Python drops or replaces an error.

    Attributes:
        signal: its number, 0 if none came.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._leave: Callable[[], str] | None = None

    @contextmanager
    def ending(self, leave: Callable[[], str]) -> Generator[None]:
        """Here, where there is nothing to save, a signal that comes or has come ends the process at once.

        Args:
            leave: does what is still to be done, and returns what to say.
        """
        self._leave = leave
        try:
            self._end()
            yield
        finally:
            self._leave = None

    def heed(self) -> None:
        """Raises :class:`Interrupted` if a signal has come."""
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
            return  # a shell and its terminal tell of one end twice
        if self.signal:
            os._exit(status(number))
        self.signal = number
        self._end()

    def _end(self) -> None:
        if self.signal and self._leave is not None:
            try:
                tell(self._leave())
            finally:
                os._exit(status(self.signal))
