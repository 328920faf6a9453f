"""SIGTERM, Ctrl-C and a closed terminal (SIGHUP): the first asks to stop, a second ends at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


def status(number: int) -> int:
    """The exit status of what a signal ended, as in a shell: 143 for SIGTERM, 130 for Ctrl-C, 129 for SIGHUP."""
    return 128 + number


class Interrupted(BaseException):
    """The first signal, where there is nothing to save yet. Not an Exception: what mends failures is not to mend it."""


class Stopped(Exception):
    """A signal asked the run to stop; all there was to save is saved."""

    def __init__(self, signal: int, where: str, folder: Path) -> None:
        super().__init__(f"stopped {where}. To go on: cwy resume {folder}")
        self.status = status(signal)


class Stop:
    """While entered, remembers the signal that asked to stop; a SIGHUP that is ignored, as below ``nohup``, stays ignored.

    Attributes:
        signal: its number, 0 if none came.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._interrupts = False

    @contextmanager
    def interrupting(self) -> Generator[None]:
        """What runs in here is left, by :class:`Interrupted`, as soon as a signal comes, or at once if one has come."""
        self._interrupts = True
        try:
            self._interrupt()
            yield
            # Raised amid a callback of C, it may have been dropped.
            self._interrupt()
        except Exception:
            # Raised amid an import, it may have become the cause of another.
            self._interrupt()
            raise
        finally:
            self._interrupts = False

    def __enter__(self) -> Stop:
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._heard) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.signal and number == signal.SIGHUP:
            return  # a shell and its terminal tell of one end twice
        if self.signal:
            os._exit(status(number))
        self.signal = number
        self._interrupt()

    def _interrupt(self) -> None:
        if self.signal and self._interrupts:
            raise Interrupted
