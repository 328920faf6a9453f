"""The experiments' commands: what they take, and where it goes. What is heavy is imported when one runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from ..terminal import complaint, plainly, printable, writable

# The command line says what is missing; the annotations below are read only once typer is there.
with suppress(ImportError):
    import typer

EXTRAS = ("safetensors", "filelock")


def demo(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the report, made if need be.")
    ] = Path("demo"),
    methods: Annotated[
        str, typer.Option(metavar="NAMES", help="Which networks take part.")
    ] = "cwy,exprnn,lstm",
    seed: Annotated[
        int, typer.Option(metavar="INT", min=0, max=2**32 - 1, help="Draws weights and data.")
    ] = 0,
    iterations: Annotated[
        int | None,
        typer.Option(
            metavar="INT", min=1, help="Training steps of each.", show_default="the recipe's, 200"
        ),
    ] = None,
) -> None:
    """A minute of the Copying task: who remembers ten symbols? A table, a picture, a sentence."""
    _need_experiments("matplotlib")
    from .engine.signals import Stop, Stopped
    from .engine.streams import outlast

    outlast()
    stopped = "stopped; nothing was written."
    with Stop() as stop:
        with stop.ending(lambda: stopped):
            from rich.console import Console

            from . import demo

            console = Console(highlight=False, markup=False)
            names = [name.strip() for name in methods.split(",") if name.strip()]
            with plainly(ValueError):
                if not names:
                    raise ValueError("--methods names none, e.g. 'cwy,lstm'.")
                runs = demo.prepare(names, iterations, seed)
            with plainly(OSError, f"cannot write to the folder --out {out}: "):
                writable(out)
            console.print(demo.introduction(runs), end="\n\n")
        try:
            found = demo.race(runs, console, stop)
        except Stopped as error:
            print(f"cwy: {stopped}", file=sys.stderr)
            sys.exit(error.status)
    console.print(demo.table(found))
    with plainly(OSError, f"cannot write to {out}: "):
        seen, files = demo.picture(found, out)
    console.print(seen, end="\n\n")
    for path in files:
        print(f"{'The report' if path.suffix == '.html' else 'The picture'}: {path}")
    console.print(demo.context(found), style="dim")


def show_recipe(what: str, method: str | None) -> None:
    """Print the settings of a recipe below the help of ``cwy train``; of several methods, the first's."""
    from rich.console import Console

    from .engine.catalog import show_recipe

    first = method.split(",")[0].strip() if method else None
    with plainly(ValueError):
        show_recipe(what, first, Console(highlight=False, markup=False))


def _list_tasks(asked: bool) -> None:
    if asked:
        from rich.console import Console

        from .engine.catalog import show_tasks

        show_tasks(Console(highlight=False, markup=False))
        raise typer.Exit


def train(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK[/RECIPE]",
            help="copying, adding, mnist, pmnist, convergence, nmt, kth, weizmann or movingmnist; e.g. copying/small.",
        ),
    ],
    every_task: Annotated[
        bool,
        typer.Option(
            "--list", callback=_list_tasks, is_eager=True, help="Show tasks, recipes and methods."
        ),
    ] = False,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Methods, as in 'cwy,exprnn,lstm'.",
            show_default="the recipe's own, or the task's first",
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Changes a setting of the recipe; may be repeated."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="INT", min=0, max=2**32 - 1, help="Draws weights and data.")
    ] = 0,
    seeds: Annotated[
        int | None,
        typer.Option(
            metavar="K", min=1, help="K runs of each method, from --seed on.", show_default=False
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, …")] = "cpu",
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="float32, float64, or bfloat16 (autocast).",
            show_default="the task's",
        ),
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the model with torch.compile.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The run's folder; of a sweep, the folder of its runs.",
            show_default="runs/TASK/…",
        ),
    ] = None,
) -> None:
    """Trains a task of the paper and writes a run folder.

    `cwy train --list` shows tasks, recipes and methods;
    `cwy train TASK/RECIPE --help` every setting with its meaning and default.

    Several methods or seeds make a sweep: one folder a run, those already
    finished are skipped. SIGTERM, Ctrl-C and the end of the terminal save and
    stop; `cwy resume` goes on.
    Many GPUs: torchrun --nproc-per-node=K -m cwy train …

    Exit status: 0 finished, 1 failed (also: a task, method, setting or device
    that is not known), 2 an option is unknown or lacks its value, 3 diverged,
    129, 130 or 143 stopped and saved.
    """
    given = (
        [None] if method is None else [name.strip() for name in method.split(",") if name.strip()]
    )
    names = list(dict.fromkeys(given))
    every = range(seed, seed + (seeds or 1))
    _run(
        lambda engine, *by: engine.train(
            task, names, every, setting or [], device, precision, compile, out, *by
        )
    )


def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")],
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Go on elsewhere than it began.", show_default=False),
    ] = None,
) -> None:
    """Goes on with a run from its last checkpoint, as if it had never stopped; a finished run is left as it is.

    Exit status: as of `cwy train`.
    """
    _run(lambda engine, *by: engine.resume(folder, device, *by))


def translate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run of nmt.")],
    text: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TEXT]", help="Sentences; without any, lines from stdin.", show_default=False
        ),
    ] = None,
    beams: Annotated[
        int, typer.Option(metavar="K", min=1, help="Sentences followed at once; 1 is greedy.")
    ] = 1,
    attention: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draws the attention of one sentence: .png, .svg, .pdf.",
            show_default=False,
        ),
    ] = None,
    held_out: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="The run's first N held-out pairs instead.", show_default=False
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, …")] = "cpu",
) -> None:
    """Translates by a trained run: a line of translation for every sentence; what to know about one goes to stderr."""
    _need_experiments()
    from .data import DataError
    from .engine.command import check_device
    from .nmt.translate import translate

    def say(note: str) -> None:
        print(f"cwy: {note}", file=sys.stderr)

    with plainly(ValueError), plainly(DataError):
        check_device(device)
        translate(run, text, beams, attention, held_out, device, say)


def runs(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to look.")] = Path("runs"),
) -> None:
    """A table of the runs below a folder."""
    from rich.console import Console

    from .engine.table import table

    console = Console(highlight=False, markup=False)
    view = table(folder, console.width)
    if view is None:
        sys.exit(f"cwy: no run folder below {folder}.")
    console.print(view)


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...", help="Run folders, or folders of them.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Where to write, made if need be.", show_default="the first DIR"
        ),
    ] = None,
) -> None:
    """Draws runs into one page, report.html, with each figure beside it as PNG and SVG.

    A damaged run is named and left out; the exit status is then 1.
    """
    from .report import ReportError, find_runs, write

    damaged: list[str] = []
    with plainly(ReportError):
        runs = find_runs(folders, damaged.append)
    where = folders[0] if out is None else out
    with plainly(OSError, f"cannot write to the folder --out {where}: "):
        written = write(runs, writable(where), damaged)
    for path in written:
        print(f"{'The report' if path.suffix == '.html' else 'The figure'}: {printable(path)}")
    if damaged:
        sys.exit("\n".join(f"cwy: left out: {told}" for told in damaged))


def data_list() -> None:
    """The data sets of the experiments, and which are here."""
    from rich.console import Console

    from .data import DataError
    from .data.command import show

    with plainly(DataError):
        show(Console(highlight=False, markup=False))


def data_check(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="One data set; all by default.", show_default=False),
    ] = None,
) -> None:
    """Compares every file with its hash, and ends with a summary.

    The exit status is 1 if a file is missing, damaged or could not be checked.
    """
    from rich.console import Console

    from .data import DataError
    from .data.command import check

    with plainly(DataError):
        whole = check(name, Console(highlight=False, markup=False))
    sys.exit(0 if whole else 1)


def data_fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set of `cwy data list`.")],
) -> None:
    """Downloads what is missing of a data set; goes on where an earlier attempt stopped.

    The exit status is 1 if the set is not complete afterwards.
    """
    from rich.console import Console

    from .data import DataError
    from .data.command import fetch

    with plainly(DataError):
        complete = fetch(name, Console(highlight=False, markup=False))
    sys.exit(0 if complete else 1)


def data_decode(
    name: Annotated[str, typer.Argument(metavar="NAME", help="kth or weizmann.")],
) -> None:
    """Decodes the videos of a data set into the frames that tasks train from; what is decoded already is left."""
    from rich.console import Console

    from .data import DataError
    from .data.command import decode

    with plainly(DataError):
        decode(name, Console(highlight=False, markup=False))


def _run(command: Callable[..., int]) -> None:
    """Ends with the status of a command of the engine, which it is given, with a console and what hears of signals."""
    from .engine.signals import Stop
    from .engine.streams import outlast

    _need_experiments()
    outlast()
    with Stop() as stop:
        with stop.ending(lambda: "stopped before anything was done."):
            from rich.console import Console

            from .engine import command as engine
        try:
            sys.exit(command(engine, Console(highlight=False, markup=False), stop))
        except (engine.ConfigError, engine.RunError) as error:
            sys.exit(printable(f"cwy: {error}", keep="\n"))
        except (engine.Diverged, engine.Stopped) as error:
            print(complaint(printable(f"cwy: {error}", keep="\n")), file=sys.stderr)
            sys.exit(error.status)


def _need_experiments(*also: str) -> None:
    """Ends the command before it has done anything where a package of the experiments is missing."""
    missing = [name for name in (*EXTRAS, *also) if find_spec(name) is None]
    if missing:
        sys.exit(
            f'cwy: the experiments need {", ".join(missing)}. To install:\n\n    pip install "cwy[cli]"\n'
        )


COMMANDS = (demo, train, resume, translate, runs, report)
DATA = (data_list, data_check, data_fetch, data_decode)
