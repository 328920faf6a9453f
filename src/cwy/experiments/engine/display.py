"""What a run shows in the terminal. Showing never makes the host wait for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ...terminal import fold, printable
from .task import Settings, load

BAR = 20
MARGIN = 3
"""Columns that stay free, where a terminal echoes ^C: at the edge it would begin another line."""
REDRAW, REPORT = 1.0, 60.0
"""Seconds between two drawings of the bar, and between two lines where there is no terminal."""
SHORT, LONG = 10.0, 900.0
"""Seconds of training: of less than the first nobody need be told, more than the second is too long for most."""


class Display:
    """Progress of one run on a console; silent without one, as on every rank but the first."""

    def __init__(
        self, console: Console | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console
        self._clock = clock
        self._live: Live | None = None
        self._shown: dict[str, str] = {}
        self._step = self._total = 0
        self._first: tuple[int, float] | None = None
        self._drawn = -REPORT

    def begin(
        self, settings: Settings, unused: set[str], step: int, total: int, facts: dict[str, Any]
    ) -> None:
        """Prints every setting that means something to this run and what is known of the data, and starts the bar."""
        if self.console is None:
            return
        self._step = step
        self._total = total
        rest = {
            key: value
            for key, value in settings.to_dict().items()
            if key not in unused.union(_HEAD)
        }
        values = " ".join(f"{key}={plain(value)}" for key, value in rest.items())
        going_on = f", going on from step {step}" if step else ""
        name = f"{settings.task}/{settings.recipe} {settings.method} seed {settings.seed}"
        self.console.print(
            f"{name} on {settings.device}, {settings.precision}{going_on}", style="bold"
        )
        self.console.print(values, style="dim")
        if facts:
            self.console.print(
                "Data: " + ", ".join(f"{key} {_fact(value)}" for key, value in facts.items()),
                style="dim",
            )
        if self.console.is_terminal:
            self._live = Live(self._line(), console=self.console, auto_refresh=False)
            self._live.start(refresh=True)

    def foretell(self, settings: Settings, steps: int, seconds: float) -> None:
        """How long so many steps will take here, where that is worth knowing before."""
        from ..report.words import duration

        whole = steps * seconds
        if whole < SHORT:
            return
        text = f"About {duration(whole)} of training here: {steps:,} steps of {seconds:.2g} s, and evaluations."
        if whole > LONG and "small" in load(settings.task).recipes and settings.recipe != "small":
            text += f" A recipe for a CPU: cwy train {settings.task}/small"
        self.say(text)

    def tick(self, step: int) -> None:
        """Count a step: the first is shown at once, a later one when the last drawing is old."""
        if self.console is None:
            return
        self._step = step
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        elif now - self._drawn < (REPORT if self._live is None else REDRAW):
            return
        self._draw(now)

    def show(self, step: int, split: str, metrics: dict[str, float]) -> None:
        """Brings the bar up to date; without a terminal, evaluations get a line each."""
        if self.console is None:
            return
        self._step = step
        self._shown[split] = (
            _words(metrics) if split == "train" else f"{split} {_words(metrics).split()[-1]}"
        )
        if self._live is not None:
            self._draw(self._clock())
        elif split != "train" or step == self._total:
            self._drawn = self._clock()
            self.console.print(f"step {step}/{self._total} {split} {_words(metrics)}")

    def say(self, text: str) -> None:
        """A sentence, above the bar."""
        if self.console is not None:
            width = self.console.width if self.console.is_terminal else None
            self.console.print(fold(printable(text, keep="\n"), width), soft_wrap=True)

    def end(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _draw(self, now: float) -> None:
        self._drawn = now
        if self._live is not None:
            self._live.update(self._line(), refresh=True)
        elif self.console is not None:
            self.console.print(self._line().plain.lstrip("━╺ "))

    def _line(self) -> Text:
        """The bar, the steps, the last metrics and the time that is left, in one line."""
        done = round(BAR * self._step / self._total)
        line = Text("━" * done, style="green", no_wrap=True)
        line.append("━" * (BAR - done), style="bright_black")
        words = [f"step {self._step}/{self._total}", self._left(), *self._shown.values()]
        if self._first is None:
            words.append("the first is being timed")
        line.append(" ".join(["", *filter(None, words)]).rstrip(","), style="none")
        if self.console is not None and self._live is not None:
            line.truncate(max(1, self.console.width - MARGIN), overflow="ellipsis")
        return line

    def _left(self) -> str:
        """The time that is left, at the pace since the first step that was shown; empty until it is known."""
        if self._first is None or self._step <= self._first[0] or self._step >= self._total:
            return ""
        from ..report.words import duration

        step, since = self._first
        pace = (self._clock() - since) / (self._step - step)
        return f"{duration(pace * (self._total - self._step))} left,"


_HEAD = ("task", "recipe", "method", "seed", "device", "precision")


def plain(value: object) -> str:
    """A setting as --set takes it."""
    return (
        "none"
        if value is None
        else f"{value:g}"
        if isinstance(value, float)
        else str(value).lower()
    )


def _fact(value: object) -> str:
    return (
        " and ".join(map(_fact, value))
        if isinstance(value, list)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


def _words(metrics: dict[str, float]) -> str:
    forms = {
        "loss": "loss {:.3g}",
        "accuracy": "acc {:.1%}",
        "bleu": "BLEU {:.1f}",
        "step_ms": "{:.3g} ms",
        "orthogonality_error": "orth {:.0e}",
    }
    return " ".join(forms[name].format(value) for name, value in metrics.items() if name in forms)
