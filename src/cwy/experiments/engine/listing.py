"""Tables in the terminal: the tasks, the settings of a recipe, and the runs below a folder."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...terminal import printable
from .checkpoint import step_of
from .config import Config, as_given
from .folder import CONFIG, Folder
from .task import TASKS, Task, load, settings

NARROWEST_NAME = 12
"""The fewest columns for a run's name."""
HEADINGS = ("run", "method", "step", "loss", "measure", "best", "time", "")
MEASURES = {
    "accuracy": "acc {:.2%}",
    "bleu": "BLEU {:.1f}",
    "perplexity": "ppl {:.3g}",
    "minimum": "grad² {:.2g}",
}
"""The column after the loss shows the first of these that a run has measured."""


def show_tasks(console: Console) -> None:
    """Print every task with its recipes and methods."""
    view = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    view.add_column("task", no_wrap=True)
    view.add_column("what, recipes and methods")
    for name in TASKS:
        task = load(name)
        about = Text(f"{first_paragraph(task)}\n")
        about.append("recipes: ", style="bold")
        about.append(f"{', '.join(recipes(task))}\n")
        about.append("methods: ", style="bold")
        about.append(f"{', '.join(task.methods())}\n")
        view.add_row(name, about)
    console.print(view)
    console.print("The first recipe and the first method are the defaults.")
    console.print(
        "A recipe of kth, weizmann or movingmnist may begin with its method: kth/tcwy-walking."
    )
    console.print("Every setting of a recipe: cwy train TASK/RECIPE --help")


def show_recipe(what: str, method: str | None, console: Console) -> None:
    """Print every setting of a recipe for a method, with its meaning and value. Mistakes raise."""
    chosen = settings(what, method)
    task = load(chosen.task)
    console.print(f"\n{chosen.task}/{chosen.recipe}, method {chosen.method}", style="bold")
    console.print(first_paragraph(task))
    console.print(f"Recipes: {', '.join(recipes(task))}")
    console.print(f"Methods: {', '.join(task.methods())}", end="\n\n")
    view = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    view.add_column("--set", no_wrap=True)
    view.add_column("default", no_wrap=True)
    view.add_column("meaning")
    about = meanings(task.Config)
    for key, value in chosen.config.to_dict().items():
        view.add_row(key, as_given(value), about[key])
    console.print(view)


def recipes(task: type[Task]) -> list[str]:
    """Return the names of a task's recipes, without those that only put a method's name first."""
    names = list(task.recipes)
    prefixed = {f"{method}-{name}" for method in task.methods() for name in names}
    return [name for name in names if name not in prefixed]


def meanings(config: type[Config]) -> dict[str, str]:
    """Return what every setting means, from the attributes in the docstrings of its classes.

    Example:
        >>> meanings(Config)["save_every"]
        'steps between two checkpoints.'
    """
    found: dict[str, str] = {}
    for kind in reversed(config.__mro__):
        if not issubclass(kind, Config):
            continue
        _, _, listed = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
        for entry in re.split(r"\n(?=    \S)", f"\n{listed}"):
            names, _, text = entry.strip().partition(": ")
            for name in names.split(", "):
                # A role of the documentation, such as :func:`cwy.orthogonal`, is its name here.
                plain = re.sub(r":\w+:`~?([^`]*)`", r"\1", " ".join(text.split()))
                found[name] = plain.replace("``", "")
    return {field.name: found[field.name] for field in fields(config)}


def first_paragraph(task: type[Task]) -> str:
    """Return the first paragraph of a task's docstring in one line."""
    return " ".join(inspect.cleandoc(task.__doc__ or "").split("\n\n")[0].split())


def show_runs(root: Path, console: Console) -> bool:
    """Print one row per run below a folder. Return whether there is one."""
    view = table(root, console.width)
    if view is None:
        return False
    console.print(view)
    return True


def table(root: Path, width: int = 80) -> Table | None:
    """Return one row per run below a folder, or None without runs.

    Args:
        root: the folder.
        width: columns of the terminal.
    """
    rows = list(_rows(root))
    if not rows:
        return None
    others = [max(len(row[at]) for row in [HEADINGS, *rows]) for at in range(1, len(HEADINGS))]
    # A space stands between two columns.
    room = max(NARROWEST_NAME, width - sum(others) - len(others))
    view = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    view.add_column(HEADINGS[0], no_wrap=True)
    view.add_column(HEADINGS[1], no_wrap=True)
    for heading in HEADINGS[2:-1]:
        view.add_column(heading, justify="right", no_wrap=True)
    view.add_column(HEADINGS[-1], no_wrap=True)
    for name, *cells in rows:
        view.add_row(in_parts(name, room), *cells)
    return view


def in_parts(name: str, width: int) -> str:
    """Break a name after hyphens and slashes only, into lines of a width if its parts allow.

    Example:
        >>> in_parts("results/nmt/cwy-128-relu-seed0", 12).split("\\n")
        ['results/nmt/', 'cwy-128-', 'relu-seed0']
    """
    lines = [""]
    for part in re.findall(r"[^-/]*[-/]|[^-/]+", name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _rows(root: Path) -> Iterator[list[str]]:
    """Yield a cell for each of HEADINGS, of every run."""
    for path in sorted(config.parent for config in root.rglob(CONFIG)):
        try:
            own, *cells = _cells(Folder(path))
        except (
            OSError,
            LookupError,
            AttributeError,
            TypeError,
            ValueError,
            ArithmeticError,
        ):
            own = path.name
            cells = [*[""] * 6, "damaged"]
        name = own
        if path != root:
            name = path.relative_to(root).as_posix()
        yield [printable(name), *cells]


def _cells(folder: Folder) -> list[str]:
    settings = folder.settings()
    rows = folder.rows()
    finals = {row["split"]: row for row in rows}
    seconds = ""
    step = 0
    if rows:
        seconds = _seconds(rows[-1])
        step = rows[-1]["step"]
    status = "open"
    best = ""
    if folder.finished:
        record = folder.record()
        status = "done"
        best = _best(record["best"])
        if not rows:
            # A sweep restores known runs without their logs.
            finals = record["final"]
            seconds = _seconds(record)
            step = record["steps"]
    elif folder.diverged:
        status = "diverged"
    final = _final(finals)
    saved = folder.last_checkpoint()
    if saved:
        step = max(step, step_of(saved))
    loss = ""
    if "loss" in final:
        loss = f"{final['loss']:.2e}"
    measures = [form.format(final[name]) for name, form in MEASURES.items() if name in final]
    return [
        f"{settings.task}/{settings.name}",
        settings.method,
        f"{step:d}",
        loss,
        next(iter(measures), ""),
        best,
        seconds,
        status,
    ]


def _seconds(row: dict[str, Any]) -> str:
    return f"{row['seconds']:.0f} s"


def _final(finals: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the last metrics of the split that counts."""
    return finals.get("test") or finals.get("validation") or finals.get("train") or {}


def _best(best: dict[str, Any] | None) -> str:
    if not best:
        return ""
    if "accuracy" in best["metric"]:
        return f"{best['value']:.2%}"
    return f"{best['value']:.2e}"
