"""The commands ``cwy bench …``: what they take, and where results go.

Heavy modules are imported when a command runs.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ..terminal import plainly, steady, writable
from . import BENCHES, Bench

if TYPE_CHECKING:
    from .runner import Request

# The command line reports what is missing. The annotations are read only once typer is there.
with suppress(ImportError):
    import typer

    # Options of several commands.
    Device = Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, …")]
    Dtype = Annotated[
        str,
        typer.Option(metavar="NAME", help="float32, float64, bfloat16 or float16."),
    ]
    Threads = Annotated[
        int | None,
        typer.Option(metavar="INT", min=1, help="CPU threads.", show_default="torch's own choice"),
    ]
    Graphs = Annotated[
        bool,
        typer.Option(
            "--graphs/--no-graphs", help="On a GPU, also time CUDA graphs, without the host."
        ),
    ]
    Seed = Annotated[
        int, typer.Option(metavar="INT", min=0, max=2**32 - 1, help="Seed of every input.")
    ]
    Record = Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="In a checkout, write the rows to results/bench/PLACE.",
            show_default=False,
        ),
    ]


def _timed(bench: Bench) -> Callable[..., None]:
    """Return the command of a benchmark."""

    def command(
        *,
        quick: Annotated[
            bool,
            typer.Option(
                "--quick", help="Take small sizes, few repeats, no slow entries: under a minute."
            ),
        ] = False,
        sizes: Annotated[
            str | None,
            typer.Option(metavar="LIST", help="Sizes, in the form above.", show_default=False),
        ] = None,
        peers: Annotated[
            str,
            typer.Option(metavar="NAMES", help="all, none, or packages, as in 'torch,geotorch'."),
        ] = "all",
        methods: Annotated[
            str,
            typer.Option(metavar="NAMES", help="all, none, or methods, as in 'cwy,hr'."),
        ] = "all",
        nonlinearity: Annotated[
            str | None,
            typer.Option(
                metavar="NAMES",
                help="all, or some, as in 'abs,relu'. Times are compared with the first.",
                show_default="modrelu,relu",
            ),
        ] = None,
        only: Annotated[
            str | None,
            typer.Option(
                metavar="NAMES",
                help="Entries by the start of their names, as in 'cwy,matrix_exp'.",
                show_default="all",
            ),
        ] = None,
        skip: Annotated[
            str | None,
            typer.Option(
                metavar="NAMES",
                help="Entries to leave out, by the start of their names.",
                show_default="none",
            ),
        ] = None,
        device: Device = "cpu",
        dtype: Dtype = "float32",
        repeats: Annotated[
            int | None,
            typer.Option(
                metavar="INT",
                min=3,
                help="Samples of each entry.",
                show_default="10, or 5 with --quick",
            ),
        ] = None,
        threads: Threads = None,
        graphs: Graphs = True,
        seed: Seed = 0,
        out: Annotated[
            Path,
            typer.Option(metavar="DIR", help="Folder for rows and picture, created if missing."),
        ] = Path("bench"),
        record: Record = None,
    ) -> None:
        from .runner import Request

        request = Request(
            sizes=sizes,
            peers=peers,
            methods=methods,
            nonlinearity=nonlinearity,
            only=only,
            skip=skip,
            device=device,
            dtype=dtype,
            quick=quick,
            repeats=repeats,
            threads=threads,
            graphs=graphs,
            seed=seed,
            command=_command_line(),
        )
        _run(bench, request, out, record)

    command.__doc__ = _help(bench)
    if not bench.nonlinearities:
        _without(command, "nonlinearity")
    return command


def _run(bench: Bench, request: Request, out: Path, record: str | None) -> None:
    """Measure a benchmark, write it, and show it."""
    from . import runner

    console = steady()
    with plainly(ValueError):
        chosen = runner.options(bench, request)
    folder = _folder(out, record)
    # A record is whole or not written.
    growing = None
    if record is None:
        growing = folder
    found, stopped = runner.measure(chosen, console, growing)
    written: list[Path] = []
    if found:
        with plainly(OSError, f"cannot write to {folder}: "):
            if record is None:
                written = runner.write(chosen, found, folder)
            elif not stopped:
                written = runner.record(found, folder)
        runner.show(chosen, found, written, console)
    if stopped:
        kept = "nothing was written"
        if written:
            kept = f"only the {len(found)} entries that were complete are written"
        console.print(f"Stopped: {kept}.")
        sys.exit(130)


def _help(bench: Bench) -> str:
    on_a_gpu = ""
    if bench.gpu:
        on_a_gpu = f"on a GPU {bench.gpu}, "
    return (
        f"{bench.about}\n\n"
        "Time methods next to their peers, show a table, write the rows as CSV and a picture. "
        f"Sizes are {' or '.join(bench.forms)}, by default {bench.sizes} "
        f"({on_a_gpu}with --quick {bench.quick})."
    )


def _without(command: Callable[..., None], name: str) -> None:
    """Hide an option of a command, which keeps its default."""
    # With the options that the annotations name: a signature of texts would lose them.
    whole = signature(command, eval_str=True)
    kept = [parameter for parameter in whole.parameters.values() if parameter.name != name]
    command.__signature__ = whole.replace(parameters=kept)  # pyrefly: ignore


def _command_line() -> str:
    """Return the command as a user types it, for the rows.

    Flags of XLA stand before the benchmark that they concern.
    """
    command = shlex.join(["cwy", *sys.argv[1:]])
    flags = os.environ.get("XLA_FLAGS")
    if flags is None or "jax" not in sys.argv:
        return command
    return f"XLA_FLAGS={shlex.quote(flags)} {command}"


def _folder(out: Path, record: str | None) -> Path:
    """Return the folder that results go to. It is tried before any work is done."""
    if record is None:
        with plainly(OSError, f"cannot write to the folder --out {out}: "):
            return writable(out)
    from .runner import record_folder

    with plainly(ValueError):
        folder = record_folder(record)
    with plainly(OSError, f"cannot write to {folder}: "):
        return writable(folder)


def everything(
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="Take small sizes and few repeats: under two minutes.")
    ] = False,
    device: Device = "cpu",
    threads: Threads = None,
    graphs: Graphs = True,
    seed: Seed = 0,
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Folder for rows and pictures, created if missing."),
    ] = Path("bench"),
) -> None:
    """Run every benchmark with its default sizes, then show a table and a picture of all."""
    from .runner import Request, run_all

    folder = _folder(out, None)
    request = Request(
        quick=quick,
        device=device,
        threads=threads,
        graphs=graphs,
        seed=seed,
        command=_command_line(),
    )
    with plainly(ValueError):
        stopped = run_all(request, folder, steady())
    if stopped:
        sys.exit(130)


def advise(
    *,
    n: Annotated[
        int,
        typer.Option("--n", metavar="N", min=2, help="The weight is N x N.", show_default=False),
    ],
    batch: Annotated[
        int,
        typer.Option(metavar="B", min=1, help="Vectors, or sequences, that it multiplies at once."),
    ] = 64,
    steps: Annotated[
        int | None,
        typer.Option(metavar="T", min=1, help="Time steps of a recurrence.", show_default="none"),
    ] = None,
    nonlinearity: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Nonlinearity of the recurrence.", show_default="modrelu"
        ),
    ] = None,
    reflections: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Reflections to try in addition to N.",
            show_default="16,32,64,128,256",
        ),
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Name the fastest method, number of reflections and backend on this machine, for one size.

    It times a training step from the free parameters: the product with a batch
    of vectors or, with --steps, a recurrence.
    """
    from .advise import Question, ask, tell
    from .runner import measure

    console = steady()
    question = Question(
        n=n,
        batch=batch,
        steps=steps,
        nonlinearity=nonlinearity,
        reflections=reflections,
        device=device,
        dtype=dtype,
        threads=threads,
        seed=seed,
    )
    with plainly(ValueError):
        asked = ask(question)
    found, stopped = measure(asked.options, console)
    tell(asked, found, console, stopped)
    if stopped:
        sys.exit(130)


def compile_times(
    *,
    sizes: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Sizes, as of rnn.", show_default="those of rnn on a GPU"
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="cuda, cuda:1, …")] = "cuda",
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the rows, created if missing.")
    ] = Path("bench"),
    record: Record = None,
) -> None:
    """Time the first call of a recurrence's kernels: compiled, from the disk, and when warm."""
    from rich.console import Console
    from rich.table import Table

    from . import parse_sizes, runner
    from .output import rows
    from .suites import compile as first

    rnn = BENCHES["rnn"]
    with plainly(ValueError):
        where = runner.find_device(device)
        chosen = parse_sizes(sizes or rnn.gpu, rnn.forms)
        if where.type != "cuda":
            raise ValueError(f"--device: kernels are compiled for a GPU, not for {device}.")
    folder = _folder(out, record)
    found = list(first.measure(chosen, rows.context(where, 0, _command_line())))
    table = Table("size", "compiled, s", "from disk, s", "warm, ms", box=None)
    for one in found:
        compiled, from_disk, warm = (one.times[kind].median for kind in first.KINDS)
        table.add_row(one.size, f"{compiled:.2f}", f"{from_disk:.3f}", f"{warm * 1e3:.2f}")
    Console(highlight=False).print(table)
    path = folder / "compile.csv"
    if record is None:
        rows.write(found, path)
    else:
        runner.record(found, folder)
    print(f"The rows: {path}")


def commands() -> dict[str, Callable[..., None]]:
    """Return every command by its name."""
    timed = {name: _timed(bench) for name, bench in BENCHES.items()}
    return {**timed, "compile": compile_times, "all": everything, "advise": advise}
