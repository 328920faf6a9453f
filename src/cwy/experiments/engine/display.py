"""Show a run in the terminal, without ever synchronizing with the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ...terminal import fold, printable
from .config import as_given
from .task import Settings, load

BAR = 15
"""Columns of the bar. A loss on held-out data still fits an 80-column terminal."""
MARGIN = 3
"""Columns that stay free, where a terminal echoes ^C: at the edge it would begin another line."""
REDRAW = 1.0
"""Seconds between two drawings of the bar."""
REPORT = 60.0
"""Seconds between two lines where there is no terminal."""
SHORT = 10.0
"""Seconds of training below which no estimate is printed."""
LONG = 900.0
"""Seconds of training above which a shorter recipe is suggested."""
HEAD = ("task", "recipe", "method", "seed", "device", "precision")
"""The settings in the first line of a run."""
METRICS = {
    "loss": "loss {:.3g}",
    "accuracy": "acc {:.1%}",
    "bleu": "BLEU {:.1f}",
}
"""The metrics that are shown, and how."""
DETAILS = {
    "orthogonality_error": "orth {:.0e}",
    "step_ms": "{:.3g} ms",
}
"""Metrics of training that are shown last, because a narrow terminal cuts the end of the line."""


class Display:
    """Show the progress of one run on a console.

    It prints nothing without a console, as on every rank but the first.
    """

    def __init__(
        self, console: Console | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console
        self._clock = clock
        self._live: Live | None = None
        self._shown: dict[str, str] = {}
        self._details = ""
        self._step = 0
        self._total = 0
        self._first_step: int | None = None
        self._first_time = 0.0
        self._drawn = -REPORT

    def begin(
        self, settings: Settings, unused: set[str], step: int, total: int, facts: dict[str, Any]
    ) -> None:
        """Print the settings and the facts of the data, and start the bar.

        Args:
            settings: of the run.
            unused: the settings that mean nothing to it, which are left out.
            step: where it continues.
            total: steps of the whole run.
            facts: of the data.
        """
        if self.console is None:
            return
        self._step = step
        self._total = total
        rest = {
            key: value for key, value in settings.to_dict().items() if key not in unused.union(HEAD)
        }
        name = f"{settings.task}/{settings.recipe} {settings.method} seed {settings.seed}"
        title = f"{name} on {settings.device}, {settings.precision}"
        if step:
            title += f", going on from step {step}"
        self.console.print(title, style="bold")
        values = " ".join(f"{key}={as_given(value)}" for key, value in rest.items())
        self.console.print(values, style="dim")
        if facts:
            known = ", ".join(f"{key} {_fact(value)}" for key, value in facts.items())
            self.console.print(f"Data: {known}", style="dim")
        if self.console.is_terminal:
            self._live = Live(self._line(), console=self.console, auto_refresh=False)
            self._live.start(refresh=True)

    def estimate(self, settings: Settings, steps: int, seconds: float) -> None:
        """Print how long the run will take, if it is not short.

        Args:
            settings: of the run.
            steps: to come.
            seconds: per step.
        """
        from ..report.words import duration

        whole = steps * seconds
        if whole < SHORT:
            return
        text = (
            f"About {duration(whole)} of training here: "
            f"{steps:,} steps of {seconds:.2g} s, and evaluations."
        )
        if whole > LONG and "small" in load(settings.task).recipes and settings.recipe != "small":
            text += f" A recipe for a CPU: cwy train {settings.task}/small"
        self.say(text)

    def tick(self, step: int) -> None:
        """Count a step: the first is shown at once, a later one when the last drawing is old."""
        if self.console is None:
            return
        self._step = step
        now = self._clock()
        interval = REDRAW
        if self._live is None:
            interval = REPORT
        if self._first_step is None:
            self._first_step = step
            self._first_time = now
        elif now - self._drawn < interval:
            return
        self._draw(now)

    def show(self, step: int, split: str, metrics: dict[str, float]) -> None:
        """Update the bar, or print a line for each evaluation without a terminal."""
        if self.console is None:
            return
        self._step = step
        words = _words(metrics, METRICS)
        self._shown[split] = words
        if split == "train":
            self._details = _words(metrics, DETAILS)
        else:
            # Only the last metric is shown. A loss needs no name.
            *_, name, value = words.split()
            if name == "loss":
                name = split
            else:
                name = f"{split} {name}"
            self._shown[split] = f"{name} {value}"
        if self._live is not None:
            self._draw(self._clock())
        elif split != "train" or step == self._total:
            self._drawn = self._clock()
            if split == "train":
                words = f"{words} {self._details}".rstrip()
            self.console.print(f"step {step}/{self._total} {split} {words}")

    def say(self, text: str) -> None:
        """Print a sentence above the bar."""
        if self.console is None:
            return
        width = None
        if self.console.is_terminal:
            width = self.console.width
        self.console.print(fold(printable(text, keep="\n"), width), soft_wrap=True)

    def end(self) -> None:
        """Remove the bar."""
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
        """Return the bar, the steps, the last metrics and the time left, in one line."""
        done = round(BAR * self._step / self._total)
        line = Text("━" * done, style="green", no_wrap=True)
        line.append("━" * (BAR - done), style="bright_black")
        words = [f"step {self._step}/{self._total}", self._left(), *self._shown.values()]
        words.append(self._details)
        if self._first_step is None:
            words.append("the first is being timed")
        line.append(" ".join(["", *filter(None, words)]).rstrip(","), style="none")
        if self.console is not None and self._live is not None:
            line.truncate(max(1, self.console.width - MARGIN), overflow="ellipsis")
        return line

    def _left(self) -> str:
        """Return the time left at the pace since the first step, empty until it is known."""
        first = self._first_step
        if first is None or self._step <= first or self._step >= self._total:
            return ""
        from ..report.words import duration

        pace = (self._clock() - self._first_time) / (self._step - first)
        return f"{duration(pace * (self._total - self._step))} left,"


def _fact(value: object) -> str:
    if isinstance(value, list):
        return " and ".join(map(_fact, value))
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def _words(metrics: dict[str, float], forms: dict[str, str]) -> str:
    """Return metrics as they are shown."""
    return " ".join(forms[name].format(value) for name, value in metrics.items() if name in forms)
