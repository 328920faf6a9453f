"""The commands ``cwy bench …``: what they take, and where it goes. What is heavy is imported when one runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Annotated

from ..terminal import plainly, steady, writable
from . import BENCHES, Bench

# The command line says what is missing; the annotations below are read only once typer is there.
with suppress(ImportError):
    import typer

    # What several commands take.
    Device = Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, …")]
    Dtype = Annotated[str, typer.Option(metavar="NAME", help="float32, float64, bfloat16 or float16.")]
    Threads = Annotated[int | None, typer.Option(metavar="INT", min=1, help="CPU threads.", show_default="torch's own choice")]
    Graphs = Annotated[
        bool, typer.Option("--graphs/--no-graphs", help="On a GPU, also as CUDA graphs: without the host's share.")
    ]
    Seed = Annotated[int, typer.Option(metavar="INT", min=0, max=2**32 - 1, help="Draws every input.")]


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
        only: Annotated[
            str | None, typer.Option(metavar="NAMES", help="Entries that begin so, as in 'cwy,matrix_exp'.", show_default="all")
        ] = None,
        device: Device = "cpu",
        dtype: Dtype = "float32",
        repeats: Annotated[
            int | None, typer.Option(metavar="INT", min=3, help="Samples of each entry.", show_default="10; --quick: 5")
        ] = None,
        threads: Threads = None,
        graphs: Graphs = True,
        seed: Seed = 0,
        out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for rows and picture, made if need be.")] = Path("bench"),
    ) -> None:
        from .command import measure, options, show, write

        console = steady()
        with plainly(ValueError):
            given = (sizes, peers, methods, device, dtype, quick, repeats, threads, seed, nonlinearity, only, graphs)
            chosen = options(bench, *given)
        with plainly(OSError, f"cannot write to the folder --out {out}: "):
            folder = writable(out)
        rows, stopped = measure(chosen, console)
        if rows:
            with plainly(OSError, f"cannot write to {folder}: "):
                written = write(chosen, rows, folder)
            show(chosen, rows, written, console)
        if stopped:
            told = f"only the {len(rows)} rows that were complete are written" if rows else "nothing was written"
            console.print(f"Stopped: {told}.")
            sys.exit(130)

    command.__doc__ = (
        f"{bench.about}\n\nTimes methods beside their peers; shows a table, writes the rows as CSV and a picture. "
        f"Sizes are {' or '.join(bench.forms)}, by default {bench.sizes} "
        f"({f'on a GPU {bench.gpu}, ' if bench.gpu else ''}with --quick {bench.quick})."
    )
    if not bench.nonlinearities:
        _without(command, "nonlinearity")
    return command


def _without(command: Callable[..., None], name: str) -> None:
    """Hides an option of a command, which keeps its default."""
    # With the options that the annotations name: a signature of texts would lose them.
    of = signature(command, eval_str=True)
    command.__signature__ = of.replace(parameters=[p for p in of.parameters.values() if p.name != name])  # pyrefly: ignore


def everything(
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes and few repeats: under two minutes.")] = False,
    device: Device = "cpu",
    threads: Threads = None,
    graphs: Graphs = True,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for rows and pictures, made if need be.")] = Path("bench"),
) -> None:
    """Every benchmark, one after the other, each with its default sizes; at the end a table and a picture of all."""
    from .together import run_all

    with plainly(OSError, f"cannot write to the folder --out {out}: "):
        folder = writable(out)
    with plainly(ValueError):
        stopped = run_all(quick, device, threads, graphs, seed, folder, steady())
    if stopped:
        sys.exit(130)


def advise(
    n: Annotated[int, typer.Option("--n", metavar="N", min=2, help="The weight is N x N.", show_default=False)],
    batch: Annotated[int, typer.Option(metavar="B", min=1, help="Vectors, or sequences, that it multiplies at once.")] = 64,
    steps: Annotated[
        int | None, typer.Option(metavar="T", min=1, help="Steps, if it is a recurrence's.", show_default="none")
    ] = None,
    nonlinearity: Annotated[str | None, typer.Option(metavar="NAME", help="The recurrence's.", show_default="modrelu")] = None,
    reflections: Annotated[
        str | None, typer.Option(metavar="LIST", help="Reflections to try beside N.", show_default="16,32,64,128,256")
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    threads: Threads = None,
    seed: Seed = 0,
) -> None:
    """Which method, how many reflections and which backend are fastest on this machine, for one size.

    Times a step of training, from the free parameters: the product with a batch of vectors or, with --steps, a recurrence.
    """
    from .advice import ask, tell
    from .command import measure

    console = steady()
    with plainly(ValueError):
        asked = ask(n, batch, steps, nonlinearity, reflections, device, dtype, threads, seed)
    rows, stopped = measure(asked.options, console)
    tell(asked, rows, console, stopped)
    if stopped:
        sys.exit(130)


def compile_times(
    sizes: Annotated[
        str | None, typer.Option(metavar="LIST", help="Sizes, as of rnn.", show_default="those of rnn on a GPU")
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="cuda, cuda:1, …")] = "cuda",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the rows, made if need be.")] = Path("bench"),
) -> None:
    """What the first call of a recurrence's kernels costs: compiled, from the disk, and when warm."""
    from rich.console import Console
    from rich.table import Table

    from . import compile as first
    from .command import find_device
    from .sizes import parse_sizes

    rnn = BENCHES["rnn"]
    with plainly(ValueError):
        where, chosen = find_device(device), parse_sizes(sizes or rnn.gpu, rnn.forms)
        if where.type != "cuda":
            raise ValueError(f"--device: kernels are compiled for a GPU, not for {device}.")
    with plainly(OSError, f"cannot write to the folder --out {out}: "):
        folder = writable(out)
    rows = list(first.measure(chosen, where))
    table = Table("size", "compiled, s", "from disk, s", "warm, ms", box=None)
    for row in rows:
        table.add_row(row.size, f"{row.compiled:.2f}", f"{row.from_disk:.3f}", f"{row.warm * 1e3:.2f}")
    Console(highlight=False).print(table)
    first.write(rows, where, folder / "compile.csv")
    print(f"The rows: {folder / 'compile.csv'}")


def commands() -> dict[str, Callable[..., None]]:
    """Every command by its name."""
    timed = {name: _timed(bench) for name, bench in BENCHES.items()}
    return {**timed, "compile": compile_times, "all": everything, "advise": advise}
