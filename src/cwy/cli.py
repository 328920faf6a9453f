"""The command ``cwy``.

A command is a function listed in COMMANDS. Heavy packages are imported when one runs.
"""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import Annotated, Any

from ._version import __version__
from .bench import cli as benches
from .experiments import cli as experiments
from .terminal import complaint, plainly

# main reports what is missing. The annotations below are read only once typer is there.
with suppress(ImportError):
    import typer

# Packages that every command needs, and the extras of those that only some need.
EXTRAS = ("typer", "rich")
OPTIONAL = {
    "PIL": "video",
    "av": "video",
    "filelock": "cli",
    "jinja2": "cli",
    "markupsafe": "cli",
    "matplotlib": "cli",
    "numpy": "cli",
    "platformdirs": "cli",
    "psutil": "cli",
    "sacrebleu": "nmt",
    "safetensors": "cli",
    "tensorboard": "experiments",
}


def info(
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    n: Annotated[
        int | None,
        typer.Option("--n", metavar="N", min=1, help="Ask about a recurrence of N units."),
    ] = None,
    reflections: Annotated[
        int | None, typer.Option(metavar="L", min=1, help="Its reflections, by default all.")
    ] = None,
    batch: Annotated[int, typer.Option(metavar="B", min=1, help="Its batch size.")] = 128,
    steps: Annotated[int, typer.Option(metavar="T", min=1, help="Its steps.")] = 512,
    nonlinearity: Annotated[
        str, typer.Option(metavar="NAME", help="Its nonlinearity.")
    ] = "modrelu",
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Its dtype.")] = "float32",
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Its device.", show_default="every device here"),
    ] = None,
    memory: Annotated[
        str, typer.Option(metavar="MODE", help="store, checkpoint or reversible.")
    ] = "store",
) -> None:
    """Print versions, devices, methods, and which backend serves each op here, and why.

    With --n, print which backend serves one recurrence on each device here, and
    why the others do not.
    """
    from .info import gather

    if n is None:
        found = gather()
    else:
        import torch

        from .info import rollout, usable

        devices = usable()
        if device is not None:
            devices = [device]
        rows = []
        with plainly(ValueError):
            kind = getattr(torch, dtype, None)
            if not isinstance(kind, torch.dtype):
                raise ValueError(f"unknown dtype {dtype!r}, e.g. float32, float64, complex64.")
            for one in devices:
                rows += rollout(n, reflections, batch, steps, kind, one, nonlinearity, memory)
        found = {"backends": rows}
    if json:
        from json import dumps

        print(dumps(found, indent=2))
    else:
        _show(found)


COMMANDS = (*experiments.COMMANDS, info)


def main() -> None:
    """Run the command that the arguments name."""
    missing = [name for name in EXTRAS if find_spec(name) is None]
    if missing:
        sys.exit(f"cwy: the command line needs {', '.join(missing)}. {_how_to_install('cli')}")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that knows only ASCII shows a ? for an accent.
            stream.reconfigure(errors="replace")
    app = _app()
    try:
        app()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in OPTIONAL:
            raise
        sys.exit(f"cwy: this command needs {package}. {_how_to_install(OPTIONAL[package])}")
    except SystemExit as end:
        # A command ends with a message if the mistake is the user's.
        if isinstance(end.code, str):
            end.code = complaint(end.code)
        raise


def _how_to_install(extra: str) -> str:
    return f'To install:\n\n    pip install "cwy[{extra}]"\n'


def _app() -> typer.Typer:
    """Return the command with all its subcommands."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_cwy)
    for command in COMMANDS:
        if command is experiments.train:
            app.command(cls=_helpful())(command)
        else:
            app.command()(command)
    bench = typer.Typer(
        no_args_is_help=True, help="Time every method next to its peers, on this machine."
    )
    for name, command in benches.commands().items():
        bench.command(name)(command)
    app.add_typer(bench, name="bench")
    data = typer.Typer(
        no_args_is_help=True,
        help="List, fetch, check and decode the data sets of the experiments.",
    )
    for command in experiments.DATA:
        data.command(command.__name__.removeprefix("data_"))(command)
    app.add_typer(data, name="data")
    return app


def _helpful() -> type[Any]:
    """Return a kind of command whose help ends with the settings of the recipe."""
    from typer.core import TyperCommand

    class Helpful(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            ctx.meta["given"] = list(args)
            return super().parse_args(ctx, args)

        def format_help(self, ctx: Any, formatter: Any) -> None:
            super().format_help(ctx, formatter)
            given, _, _ = self.make_parser(ctx).parse_args(args=list(ctx.meta.get("given", [])))
            if given.get("task"):
                from .experiments.cli import show_recipe

                show_recipe(given["task"], given.get("method"))

    return Helpful


def _cwy(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train and time networks with orthogonal, unitary and Stiefel weights."""


def _version(asked: bool) -> None:
    if asked:
        print(f"cwy {__version__}")
        raise typer.Exit


def _show(found: dict[str, Any]) -> None:
    """Print what is known as tables."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)

    def show(title: str, rows: list[dict[str, str]]) -> None:
        table = Table(
            title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
        )
        for heading in rows[0]:
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(*row.values())
        console.print(table)

    if "versions" not in found:
        show("Backends", found["backends"])
        return
    versions = found["versions"].items()
    show("Versions", [{"package": name, "version": version} for name, version in versions])
    show("Devices", [{"device": row["device"], "what": _device(row)} for row in found["devices"]])
    show("Methods", [_method(row) for row in found["methods"]])
    show("Backends", found["backends"])
    show("CUDA tiers of wy, on an H200", [_tier(row) for row in found["tiers"]])


def _tier(row: dict[str, Any]) -> dict[str, str]:
    shown = {heading: str(row[heading]) for heading in ("constant", "value", "way", "decides")}
    return shown | {"because of": row["limit"] or row["record"].rpartition("/")[2]}


def _method(row: dict[str, Any]) -> dict[str, str]:
    """Return the row of a method in the table that is shown."""
    scope = "no"
    if row["complex"] and row["real"]:
        scope = "yes"
    elif row["complex"]:
        scope = "only"
    return {
        "name": row["name"],
        "domain": row["domain"],
        "kind": row["kind"],
        "complex": scope,
        "paper": row["paper"],
    }


def _device(row: dict[str, Any]) -> str:
    """Return what is known of a device, in a line."""
    if "why_not" in row:
        return f"not here: {row['why_not']}"
    named = {
        "vector": "{}",
        "threads": "{} threads",
        "capability": "compute capability {}",
        "memory_gib": "{} GiB",
    }
    known = [text.format(row[key]) for key, text in named.items() if key in row]
    return ", ".join([row["name"], *known])
