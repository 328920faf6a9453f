"""What a run shows in the terminal. It is refreshed when the log is written, never between."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ...terminal import printable
from .task import Settings


class Display:
    """Progress of one run on a console; silent without one, as on every rank but the first."""

    def __init__(self, console: Console | None) -> None:
        self.console = console
        self._progress: Progress | None = None
        self._bar = TaskID(0)
        self._shown: dict[str, str] = {}

    def begin(self, settings: Settings, unused: set[str], step: int, total: int, facts: dict[str, Any]) -> None:
        """Prints every setting that means something to this run and what is known of the data, and starts the bar."""
        if self.console is None:
            return
        self._total = total
        rest = {key: value for key, value in settings.to_dict().items() if key not in unused.union(_HEAD)}
        values = " ".join(f"{key}={_plain(value)}" for key, value in rest.items())
        going_on = f", going on from step {step}" if step else ""
        name = f"{settings.task}/{settings.recipe} {settings.method} seed {settings.seed}"
        self.console.print(f"{name} on {settings.device}, {settings.precision}{going_on}", style="bold")
        self.console.print(values, style="dim")
        if facts:
            self.console.print("Data: " + ", ".join(f"{key} {_fact(value)}" for key, value in facts.items()), style="dim")
        if self.console.is_terminal:
            columns = (
                BarColumn(None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[shown]}"),
                TimeRemainingColumn(compact=True),
            )
            self._progress = Progress(*columns, console=self.console, auto_refresh=False, expand=True)
            self._bar = self._progress.add_task("", total=total, completed=step, shown="")
            self._progress.start()

    def show(self, step: int, split: str, metrics: dict[str, float]) -> None:
        """Brings the bar up to date; without a terminal, evaluations get a line each."""
        if self.console is None:
            return
        if self._progress is None:
            if split != "train" or step == self._total:
                self.console.print(f"step {step}/{self._total} {split} {_words(metrics)}")
            return
        self._shown[split] = _words(metrics) if split == "train" else f"{split} {_words(metrics).split()[-1]}"
        self._progress.update(self._bar, completed=step, shown=" ".join(self._shown.values()), refresh=True)

    def say(self, text: str) -> None:
        """A sentence, above the bar."""
        if self.console is not None:
            self.console.print(printable(text, keep="\n"), soft_wrap=True)

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


_HEAD = ("task", "recipe", "method", "seed", "device", "precision")


def _plain(value: object) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value).lower()


def _fact(value: object) -> str:
    return (
        " and ".join(map(_fact, value)) if isinstance(value, list) else f"{value:,}" if isinstance(value, int) else str(value)
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
