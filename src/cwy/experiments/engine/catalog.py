"""What ``cwy train --list`` and ``cwy train TASK/RECIPE --help`` show: tasks, recipes, methods and settings."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .config import Config
from .display import plain
from .task import TASKS, Task, load, settings


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
    """Print every setting of a recipe for a method, its meaning and its value there; a mistake raises."""
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
        view.add_row(key, plain(value), about[key])
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
                found[name] = re.sub(r":\w+:`~?([^`]*)`", r"\1", " ".join(text.split()))
    return {field.name: found[field.name] for field in fields(config)}


def first_paragraph(task: type[Task]) -> str:
    """Return the first paragraph of a task's docstring in one line."""
    return " ".join(inspect.cleandoc(task.__doc__ or "").split("\n\n")[0].split())
