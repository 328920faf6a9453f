"""The time that training takes."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager


class Clock:
    """Seconds of training: stopped while the run evaluates and saves, and until its first step has compiled what it must."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._before = seconds
        self._since: float | None = None

    @property
    def going(self) -> bool:
        return self._since is not None

    @property
    def seconds(self) -> float:
        return self._before + (0.0 if self._since is None else time.perf_counter() - self._since)

    def start(self) -> None:
        self._since = time.perf_counter()

    @contextmanager
    def stopped(self) -> Generator[None]:
        going, self._before, self._since = self.going, self.seconds, None
        yield
        if going:
            self.start()
