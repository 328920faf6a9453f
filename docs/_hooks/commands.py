"""Write the reference of the command line from the command line itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from typer.cli import get_docs_for_click

from cwy import cli


def reference(*names: str) -> str:
    """Describe commands, and those of groups, with all their options, in Markdown."""
    root: Any = typer.main.get_command(cli._app())
    parts = []
    for name in names:
        parts += _pages(root.commands[name], f"cwy {name}")
    return "\n\n".join(parts)


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
