"""SIGTERM and Ctrl-C: the first asks the run to save and stop, the second ends it at once."""

from __future__ import annotations

import os
import signal
from types import FrameType


class Stop:
    """While entered, remembers the signal that asked to stop.

    Attributes:
        signal: its number, 0 if none came. The exit status is 128 + this, as in a shell: 143 for SIGTERM, 130 for Ctrl-C.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.signal = 0

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._heard) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            os._exit(128 + number)
        self.signal = number
