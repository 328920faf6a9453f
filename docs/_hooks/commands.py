"""Write the reference of the command line from the command line itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.cli import get_docs_for_click

from cwy import cli

OPTIONS = "**Options**:\n\n"


def reference(*names: str) -> str:
    """Describe commands, and those of groups, with all their options, in Markdown."""
    root: Any = typer.main.get_command(cli._app())
    parts = []
    for name in names:
        parts += _pages(root.commands[name], f"cwy {name}")
    return "\n\n".join(parts)


def group(name: str) -> str:
    """Describe the commands of a group. Options that most of them share are listed once."""
    parts = reference(name).split("\n\n## ")
    counts = Counter(line for part in parts for line in _options(part))
    shared = [line for line, count in counts.items() if 2 * count > len(parts)]
    first = "\n".join(["## Shared options\n", *shared])
    first += "\n\nMost commands take all of these. The others name those that they take."
    described = [parts[0], *(f"## {part}" for part in parts[1:])]
    return "\n\n".join([first, *(_without(part, shared) for part in described)])


def _options(part: str) -> list[str]:
    return [line for line in part.splitlines() if line.startswith("* `--")]


def _without(part: str, shared: Sequence[str]) -> str:
    """Replace the shared options of a command by a link to their list."""
    options = _options(part)
    own = [line for line in options if line not in shared]
    taken = [line for line in shared if line in options]
    link = "[shared options](#shared-options)"
    text = f"Options: all {link}."
    if len(taken) < len(shared):
        names = [re.findall("`--[a-z-]+", line)[0] + "`" for line in taken]
        text = f"Options: {', '.join(names)} of the {link}."
    if own:
        text = "\n".join([f"{text.removesuffix('.')}, and", "", *own])
    before = part.partition(OPTIONS)[0]
    return f"{before}{text}"


def _pages(command: Any, name: str) -> Iterator[str]:
    for child, inner in getattr(command, "commands", {}).items():
        yield from _pages(inner, f"{name} {child}")
    if not hasattr(command, "commands"):
        yield _page(command, name)


def _page(command: Any, name: str) -> str:
    prefix, _, last = name.rpartition(" ")
    context = typer.Context(command, info_name=last)
    text = get_docs_for_click(obj=command, ctx=context, name=last, call_prefix=prefix)
    # A heading of this page, and usage as a plain block.
    text = re.sub(r"^# ", "## ", text, flags=re.MULTILINE)
    text = re.sub(r"\*\*Usage\*\*:\n\n```console\n\$ (.*)\n```", r"```\n\1\n```", text)
    text = re.sub(r"^\* `--help`.*\n", "", text, flags=re.MULTILINE)
    text = text.replace("**Options**:\n\n\n", "").removesuffix("**Options**:\n\n")
    # A name needs no type next to it, and bounds are words.
    text = re.sub(r" <[\w\[\]]+>`", "`", text)
    text = re.sub(r"\[default: \((.*?)\)", r"[default: \1", text)
    text = re.sub(r"x>=(\d+)", r"at least \1", text)
    text = re.sub(r"(\d+)<=x<=(\d+)", r"\1 to \2", text)
    return text.strip()
