"""The experiments' commands: their options, and the functions that they call.

Heavy modules are imported when a command runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..terminal import complaint, plainly, printable, writable

if TYPE_CHECKING:
    from rich.console import Console

    from .engine.signals import Stop

# The command line names what is missing. The annotations below are read only if typer is there.
with suppress(ImportError):
    import typer

EXTRAS = ("safetensors", "filelock")


def demo(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the report, created if missing.")
    ] = Path("demo"),
    methods: Annotated[
        str, typer.Option(metavar="NAMES", help="Which networks take part.")
    ] = "cwy,exprnn,lstm",
    seed: Annotated[
        int, typer.Option(metavar="INT", min=0, max=2**32 - 1, help="Seed of weights and data.")
    ] = 0,
    iterations: Annotated[
        int | None,
        typer.Option(
            metavar="INT", min=1, help="Training steps of each.", show_default="the recipe's, 200"
        ),
    ] = None,
) -> None:
    """Train for a minute on the Copying task: who remembers ten symbols?"""
    _need_experiments("matplotlib")
    from .engine.signals import Stop, Stopped, outlast

    outlast()
    stopped = "stopped, and nothing was written."
    with Stop() as stop:
        with stop.ending(lambda: stopped):
            from . import demo

            console = _console()
            names = _names(methods)
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
        label = "The picture"
        if path.suffix == ".html":
            label = "The report"
        print(f"{label}: {path}")
    console.print(demo.context(found), style="dim")


def show_recipe(what: str, method: str | None) -> None:
    """Print the settings of a recipe below the help of ``cwy train``, for the first method."""
    from .engine.listing import show_recipe

    first = None
    if method:
        first = method.split(",")[0].strip()
    with plainly(ValueError):
        show_recipe(what, first, _console())


def _list_tasks(asked: bool) -> None:
    if asked:
        from .engine.listing import show_tasks

        show_tasks(_console())
        raise typer.Exit


def train(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK[/RECIPE]",
            help="copying, adding, mnist, pmnist, convergence, nmt, retrieval, kth, weizmann or "
            "movingmnist, as in copying/small.",
        ),
    ],
    *,
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
            "--set", metavar="KEY=VALUE", help="Change a setting of the recipe. May be repeated."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="INT", min=0, max=2**32 - 1, help="Seed of weights and data.")
    ] = 0,
    seeds: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=1,
            help="Run each method with K seeds, from --seed on.",
            show_default=False,
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
            help="Folder of the run, or of the runs of a sweep.",
            show_default="runs/TASK/…",
        ),
    ] = None,
) -> None:
    """Train a task of the paper and write a run folder.

    `cwy train --list` shows tasks, recipes and methods.
    `cwy train TASK/RECIPE --help` shows every setting with its meaning and default.

    Several methods or seeds make a sweep, with one folder per run. A sweep skips
    finished runs. SIGTERM, Ctrl-C and the end of the terminal save and stop.
    `cwy resume` continues.
    Many GPUs: torchrun --nproc-per-node=K -m cwy train …

    The exit status is 0 if the run finished, and 1 if it failed or if a task,
    method, setting or device is unknown. It is 2 for an unknown option, 3 if the
    run diverged, and 129, 130 or 143 if it was stopped and saved.
    """

    def start(console: Console, stop: Stop) -> int:
        from .engine.runner import Sweep, train

        methods: list[str | None] = [None]
        if method is not None:
            methods = list(dict.fromkeys(_names(method)))
        sweep = Sweep(
            task,
            methods=methods,
            seeds=range(seed, seed + (seeds or 1)),
            assignments=setting or (),
            device=device,
            precision=precision,
            compile=compile,
            out=out,
        )
        return train(sweep, console, stop)

    _run(start)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")],
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Continue on another device.", show_default=False),
    ] = None,
) -> None:
    """Continue a run from its last checkpoint, as if it had never stopped.

    A finished run stays as it is. The exit status is that of `cwy train`.
    """

    def start(console: Console, stop: Stop) -> int:
        from .engine.runner import resume

        return resume(folder, device, console, stop)

    _run(start)


def translate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run of nmt.")],
    text: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TEXT]", help="Sentences, by default lines from stdin.", show_default=False
        ),
    ] = None,
    beams: Annotated[
        int, typer.Option(metavar="K", min=1, help="Beams of the search. 1 is greedy.")
    ] = 1,
    attention: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the attention of one sentence: .png, .svg, .pdf.",
            show_default=False,
        ),
    ] = None,
    held_out: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Translate the run's first N validation pairs, or test pairs if it has none.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, …")] = "cpu",
) -> None:
    """Translate by a trained run, one line per sentence. Notes go to stderr."""
    _need_experiments()
    from .data import DataError
    from .engine.runner import check_device
    from .nmt.translate import translate

    def say(note: str) -> None:
        print(f"cwy: {note}", file=sys.stderr)

    with plainly(ValueError), plainly(DataError):
        check_device(device)
        translate(run, text, beams, attention, held_out, device, say)


def runs(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to look.")] = Path("runs"),
) -> None:
    """List the runs below a folder."""
    from .engine.listing import show_runs

    if not show_runs(folder, _console()):
        sys.exit(f"cwy: no run folder below {folder}.")


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
            metavar="FOLDER",
            help="Where to write, created if missing.",
            show_default="the first DIR",
        ),
    ] = None,
) -> None:
    """Draw runs into one page, report.html, with each figure next to it as PNG and SVG.

    A damaged run is named and left out, and the exit status is 1.
    """
    from .report import ReportError, find_runs, write

    damaged: list[str] = []
    with plainly(ReportError):
        runs = find_runs(folders, damaged.append)
    where = out
    if where is None:
        where = folders[0]
    with plainly(OSError, f"cannot write to the folder --out {where}: "):
        written = write(runs, writable(where), damaged)
    for path in written:
        label = "The figure"
        if path.suffix == ".html":
            label = "The report"
        print(f"{label}: {printable(path)}")
    if damaged:
        sys.exit("\n".join(f"cwy: left out: {reason}" for reason in damaged))


def data_list() -> None:
    """List the data sets of the experiments, and which are here."""
    from .data import DataError
    from .data.manage import show

    with plainly(DataError):
        show(_console())


def data_check(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="One data set, by default all.", show_default=False),
    ] = None,
) -> None:
    """Compare every file with its hash, and print a summary.

    The exit status is 1 if a file is missing, damaged or could not be checked.
    """
    from .data import DataError
    from .data.manage import check

    with plainly(DataError):
        whole = check(name, _console())
    sys.exit(int(not whole))


def data_fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set of `cwy data list`.")],
) -> None:
    """Download the missing files of a data set, and continue where an attempt stopped.

    The exit status is 1 if the set is not complete afterwards.
    """
    from .data import DataError
    from .data.manage import fetch

    with plainly(DataError):
        complete = fetch(name, _console())
    sys.exit(int(not complete))


def data_decode(
    name: Annotated[str, typer.Argument(metavar="NAME", help="kth or weizmann.")],
) -> None:
    """Decode the videos of a data set into the frames that tasks train from.

    Decoded videos are skipped.
    """
    from .data import DataError
    from .data.manage import decode

    with plainly(DataError):
        decode(name, _console())


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False)


def _names(text: str) -> list[str]:
    """Return the names in a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _run(start: Callable[[Console, Stop], int]) -> None:
    """End with the status that a function of the engine returns.

    A signal that comes while the engine is imported ends the command at once.
    """
    from .engine.signals import Stop, outlast

    _need_experiments()
    outlast()
    with Stop() as stop:
        with stop.ending(lambda: "stopped before anything was done."):
            from .engine.runner import ConfigError, Diverged, RunError, Stopped

            console = _console()
        try:
            sys.exit(start(console, stop))
        except (ConfigError, RunError) as error:
            sys.exit(printable(f"cwy: {error}", keep="\n"))
        except (Diverged, Stopped) as error:
            print(complaint(printable(f"cwy: {error}", keep="\n")), file=sys.stderr)
            sys.exit(error.status)


def _need_experiments(*also: str) -> None:
    """End the command before it has done anything if a package of the experiments is missing."""
    missing = [name for name in (*EXTRAS, *also) if find_spec(name) is None]
    if missing:
        sys.exit(
            f"cwy: the experiments need {', '.join(missing)}. To install:\n\n"
            '    pip install "cwy[cli]"\n'
        )


COMMANDS = (demo, train, resume, translate, runs, report)
DATA = (data_list, data_check, data_fetch, data_decode)
