"""The command ``cwy``. A command is a function listed in COMMANDS; what is heavy is imported when one runs."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

from ._version import __version__
from .bench import BENCHES, Bench

# main says what is missing; the annotations below are read only once typer is there.
with suppress(ImportError):
    import typer

EXTRAS = ("typer", "rich", "matplotlib")
EXPERIMENTS = ("safetensors", "filelock")


def info(
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    n: Annotated[int | None, typer.Option(metavar="N", min=1, help="Ask about a recurrence of N units.")] = None,
    reflections: Annotated[int | None, typer.Option(metavar="L", min=1, help="Its reflections; all by default.")] = None,
    batch: Annotated[int, typer.Option(metavar="B", min=1, help="Its batch size.")] = 128,
    steps: Annotated[int, typer.Option(metavar="T", min=1, help="Its steps.")] = 512,
    nonlinearity: Annotated[str, typer.Option(metavar="NAME", help="Its nonlinearity.")] = "modrelu",
    dtype: Annotated[str, typer.Option(metavar="NAME", help="Its dtype.")] = "float32",
    device: Annotated[str, typer.Option(metavar="NAME", help="Its device.")] = "cpu",
    memory: Annotated[str, typer.Option(metavar="MODE", help="store, checkpoint or reversible.")] = "store",
) -> None:
    """Versions, devices, methods, and which backend serves each op here, and why.

    With --n, which backend serves one recurrence, and why the others are passed over.
    """
    from .info import gather

    if n is None:
        found = gather()
    else:
        import torch

        from .info import rollout

        with _plainly(ValueError):
            kind = getattr(torch, dtype, None)
            if not isinstance(kind, torch.dtype):
                raise ValueError(f"unknown dtype {dtype!r}, e.g. float32, float64, complex64.")
            found = {"backends": rollout(n, reflections, batch, steps, kind, device, nonlinearity, memory)}
    if json:
        from json import dumps

        print(dumps(found, indent=2))
    else:
        _show(found)


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the report, made if need be.")] = Path("demo"),
    methods: Annotated[str, typer.Option(metavar="NAMES", help="Which networks take part.")] = "cwy,exprnn,lstm",
    seed: Annotated[int, typer.Option(metavar="INT", min=0, max=2**32 - 1, help="Draws weights and data.")] = 0,
    iterations: Annotated[
        int | None, typer.Option(metavar="INT", min=1, help="Training steps of each.", show_default="the recipe's, 600")
    ] = None,
) -> None:
    """A minute of the Copying task: who remembers ten symbols? A table, a picture, a sentence."""
    _need_experiments()
    from rich.console import Console

    from .experiments import demo

    console = Console(highlight=False, markup=False)
    names = [name.strip() for name in methods.split(",") if name.strip()]
    with _plainly(ValueError):
        if not names:
            raise ValueError("--methods names none, e.g. 'cwy,lstm'.")
        runs = demo.prepare(names, iterations, seed)
    with _plainly(OSError, f"cannot write to the folder --out {out}: "):
        _writable(out)
    console.print(demo.introduction(runs), end="\n\n")
    try:
        found = demo.race(runs, console)
    except KeyboardInterrupt:
        print("Stopped: nothing was written.")
        sys.exit(130)
    console.print(demo.table(found))
    with _plainly(OSError, f"cannot write to {out}: "):
        seen, files = demo.picture(found, out)
    console.print(seen, end="\n\n")
    for path in files:
        print(f"{'The report' if path.suffix == '.html' else 'The picture'}: {path}")
    console.print(demo.context(found), style="dim")


def _timed(bench: Bench) -> Callable[..., None]:
    """The command of a benchmark."""

    def command(
        quick: Annotated[
            bool, typer.Option("--quick", help="Small sizes, few repeats, no slow entries: under a minute.")
        ] = False,
        sizes: Annotated[str | None, typer.Option(metavar="LIST", help="Sizes, in the form above.", show_default=False)] = None,
        peers: Annotated[str, typer.Option(metavar="NAMES", help="all, none, or packages, as in 'torch,geotorch'.")] = "all",
        methods: Annotated[str, typer.Option(metavar="NAMES", help="all, none, or methods, as in 'cwy,hr'.")] = "all",
        nonlinearity: Annotated[
            str | None,
            typer.Option(
                metavar="NAMES",
                help="all, or some, as in 'abs,relu'; times are compared with the first's.",
                show_default="modrelu,relu",
            ),
        ] = None,
        device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, …")] = "cpu",
        dtype: Annotated[str, typer.Option(metavar="NAME", help="float32, float64, bfloat16 or float16.")] = "float32",
        repeats: Annotated[
            int | None, typer.Option(metavar="INT", min=3, help="Samples of each entry.", show_default="10; --quick: 5")
        ] = None,
        threads: Annotated[
            int | None, typer.Option(metavar="INT", min=1, help="CPU threads.", show_default="torch's own choice")
        ] = None,
        seed: Annotated[int, typer.Option(metavar="INT", min=0, max=2**32 - 1, help="Draws every input.")] = 0,
        out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for rows and picture, made if need be.")] = Path("bench"),
    ) -> None:
        from rich.console import Console

        from .bench.command import measure, options, show, write

        console = Console(highlight=False, markup=False)
        with _plainly(ValueError):
            chosen = options(bench, sizes, peers, methods, device, dtype, quick, repeats, threads, seed, nonlinearity)
        with _plainly(OSError, f"cannot write to the folder --out {out}: "):
            folder = _writable(out)
        rows, stopped = measure(chosen, console)
        if rows:
            with _plainly(OSError, f"cannot write to {folder}: "):
                written = write(chosen, rows, folder)
            show(chosen, rows, written, console)
        if stopped:
            told = f"only the {len(rows)} rows that were complete are written" if rows else "nothing was written"
            console.print(f"Stopped: {told}.")
            sys.exit(130)

    command.__doc__ = (
        f"{bench.about}\n\nTimes every method beside its peers; shows a table, writes the rows as CSV and a picture. "
        f"Sizes are {' or '.join(bench.forms)}, by default {bench.sizes} (with --quick {bench.quick})."
    )
    if not bench.nonlinearities:
        _without(command, "nonlinearity")
    return command


def _without(command: Callable[..., None], name: str) -> None:
    """Hides an option of a command, which keeps its default."""
    of = signature(command)
    command.__signature__ = of.replace(parameters=[p for p in of.parameters.values() if p.name != name])  # pyrefly: ignore


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run folders, or folders of them.", show_default=False)
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write, made if need be.", show_default="the first DIR")
    ] = None,
) -> None:
    """Draws runs into one page, report.html, with each figure beside it as PNG and SVG."""
    from .experiments.report import ReportError, find_runs, write

    with _plainly(ReportError):
        runs = find_runs(folders)
    where = folders[0] if out is None else out
    with _plainly(OSError, f"cannot write to the folder --out {where}: "):
        written = write(runs, _writable(where))
    for path in written:
        print(f"{'The report' if path.suffix == '.html' else 'The figure'}: {path}")


def train(
    task: Annotated[
        str, typer.Argument(metavar="TASK[/RECIPE]", help="copying, adding, mnist, pmnist or convergence; e.g. copying/small.")
    ],
    method: Annotated[str, typer.Option(metavar="NAMES", help="Methods, as in 'cwy,exprnn,lstm'.")] = "cwy",
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Changes a setting of the recipe; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="INT", min=0, max=2**32 - 1, help="Draws weights and data.")] = 0,
    seeds: Annotated[
        int | None, typer.Option(metavar="K", min=1, help="K runs of each method, from --seed on.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, …")] = "cpu",
    precision: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="float32, float64, or bfloat16 (autocast).", show_default="the task's"),
    ] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Compile the model with torch.compile.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The run's folder; of a sweep, the folder of its runs.", show_default="runs/TASK/…"),
    ] = None,
) -> None:
    """Trains a task of the paper and writes a run folder.

    Several methods or seeds make a sweep: one folder a run, those already finished are skipped. SIGTERM and Ctrl-C save and
    stop; `cwy resume` goes on. Many GPUs: torchrun --nproc-per-node=K -m cwy train …

    Exit status: 0 finished, 1 failed, 2 wrong usage, 3 diverged, 130 or 143 stopped and saved.
    """
    from .experiments.engine import command

    names = list(dict.fromkeys(name.strip() for name in method.split(",") if name.strip()))
    every = range(seed, seed + (seeds or 1))
    _run(lambda console: command.train(task, names, every, setting or [], device, precision, compile, out, console))


def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")],
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Go on elsewhere than it began.", show_default=False)
    ] = None,
) -> None:
    """Goes on with a run from its last checkpoint, as if it had never stopped; a finished run is left as it is."""
    from .experiments.engine import command

    _run(lambda console: command.resume(folder, device, console))


def runs(folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to look.")] = Path("runs")) -> None:
    """A table of the runs below a folder."""
    from rich.console import Console

    from .experiments.engine.table import table

    view = table(folder)
    if view is None:
        sys.exit(f"cwy: no run folder below {folder}.")
    Console(highlight=False, markup=False).print(view)


def _run(command: Callable[..., int]) -> None:
    """Ends with the status of a command of the engine."""
    _need_experiments()
    from rich.console import Console

    from .experiments.engine.command import RunError
    from .experiments.engine.config import ConfigError
    from .experiments.engine.loop import Stopped
    from .experiments.engine.meter import Diverged

    try:
        sys.exit(command(Console(highlight=False, markup=False)))
    except (ConfigError, RunError) as error:
        sys.exit(f"cwy: {error}")
    except (Diverged, Stopped) as error:
        print(f"cwy: {error}", file=sys.stderr)
        sys.exit(error.status)


def data_list() -> None:
    """The data sets of the experiments, and which are here."""
    from rich.console import Console

    from .experiments.data.command import show

    show(Console(highlight=False, markup=False))


def data_check(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="One data set; all by default.", show_default=False)
    ] = None,
) -> None:
    """Compares every file with its hash; the exit status is 1 if one is missing or damaged."""
    from rich.console import Console

    from .experiments.data import DataError
    from .experiments.data.command import check

    with _plainly(DataError):
        whole = check(name, Console(highlight=False, markup=False))
    sys.exit(0 if whole else 1)


def data_fetch(name: Annotated[str, typer.Argument(metavar="NAME", help="A data set of `cwy data list`.")]) -> None:
    """Downloads what is missing of a data set; goes on where an earlier attempt stopped."""
    from rich.console import Console

    from .experiments.data import DataError
    from .experiments.data.command import fetch

    with _plainly(DataError):
        fetch(name, Console(highlight=False, markup=False))


COMMANDS = (demo, train, resume, runs, report, info)
DATA = (data_list, data_check, data_fetch)


def main() -> None:
    """Runs the command that the arguments name."""
    missing = [name for name in EXTRAS if find_spec(name) is None]
    if missing:
        sys.exit(f'cwy: the command line needs {", ".join(missing)}. To install:\n\n    pip install "cwy[cli]"\n')
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that knows only ASCII shows a ? for an accent, and goes on.
            stream.reconfigure(errors="replace")
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_cwy)
    for command in COMMANDS:
        app.command()(command)
    benches = typer.Typer(no_args_is_help=True, help="Times every method beside its peers, on this machine.")
    for bench in BENCHES.values():
        benches.command(bench.name)(_timed(bench))
    app.add_typer(benches, name="bench")
    data = typer.Typer(no_args_is_help=True, help="The experiments' data sets: fetched, checked by hash, kept in one folder.")
    for command in DATA:
        data.command(command.__name__.removeprefix("data_"))(command)
    app.add_typer(data, name="data")
    app()


def _cwy(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Orthogonal, unitary and Stiefel weights for PyTorch, as cheap to train as free ones."""


def _version(asked: bool) -> None:
    if asked:
        print(f"cwy {__version__}")
        raise typer.Exit


def _need_experiments() -> None:
    """Ends the command before it has done anything where a package of the experiments is missing."""
    missing = [name for name in EXPERIMENTS if find_spec(name) is None]
    if missing:
        sys.exit(f'cwy: the experiments need {", ".join(missing)}. To install:\n\n    pip install "cwy[experiments]"\n')


@contextmanager
def _plainly(error: type[Exception], what: str = "") -> Generator[None]:
    """Ends the command with one line, not a traceback, where such an error is the user's to mend."""
    try:
        yield
    except error as mistake:
        sys.exit(f"cwy: {what}{getattr(mistake, 'strerror', None) or mistake}")


def _writable(folder: Path) -> Path:
    """The folder, made if need be; raises before any work is done if nothing can be written there."""
    from tempfile import TemporaryFile

    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=folder):
        return folder


def _show(found: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)

    def show(title: str, rows: list[dict[str, str]]) -> None:
        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
        for heading in rows[0]:
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(*row.values())
        console.print(table)

    if "versions" not in found:
        show("Backends", found["backends"])
        return
    show("Versions", [{"package": name, "version": version} for name, version in found["versions"].items()])
    show("Devices", [{"device": row["device"], "what": _device(row)} for row in found["devices"]])
    show("Methods", [_method(row) for row in found["methods"]])
    show("Backends", found["backends"])


def _method(row: dict[str, Any]) -> dict[str, str]:
    scope = ("yes" if row["real"] else "only") if row["complex"] else "no"
    return {**{key: row[key] for key in ("name", "domain", "kind")}, "complex": scope, "paper": row["paper"]}


def _device(row: dict[str, Any]) -> str:
    if "why_not" in row:
        return f"not here: {row['why_not']}"
    named = {"vector": "{}", "threads": "{} threads", "capability": "compute capability {}", "memory_gib": "{} GiB"}
    return ", ".join([row["name"], *(text.format(row[key]) for key, text in named.items() if key in row)])
