"""Rows: one measurement each, with everything it depends on, and the CSV that holds them."""

from __future__ import annotations

import csv
import io
import os
import platform
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal, get_args, get_type_hints

import torch

from .. import __version__, info
from ..terminal import whole
from .entry import Group

Status = Literal["ok", "failed", "skipped", "missing"]


@dataclass(frozen=True)
class Context:
    """What a measurement belongs to.

    ``commit`` is that of cwy's source, "+dirty" if it was changed since, empty if it is not a git checkout.
    ``threads`` are the CPU's; ``load`` is how many processes wanted it in the minute before (None: not known).
    """

    device: str
    device_name: str
    threads: int
    load: float | None
    python: str
    torch: str
    cwy: str
    commit: str
    seed: int
    date: str


@dataclass(frozen=True)
class Row(Context):
    """One entry at one size. Times are seconds a call; what was not measured is None.

    Attributes:
        bench, entry, group, about: what was timed.
        size: as the command line takes it, e.g. "4096x64".
        dtype: of the result.
        package: what the entry needs, with its version: "geotorch 0.4.0".
        status: "ok", "failed" (its check, or with an exception), "skipped" (too slow, or can't serve) or
            "missing" (not installed).
        reason: why there are no times; where the status is "ok", why one as a CUDA graph is missing.
        forward, forward_q1, forward_q3, forward_repeats: median, quartiles and count of the forward pass.
        forward_mean, forward_se: its mean, and the standard error of that.
        both, …: the same of forward and backward.
        both_inline, …: the same on a GPU, the backward pass in the thread that asks for it rather than in one of autograd's.
        forward_graph, both_graph, …: the same of both, replayed as CUDA graphs; None where they can't be recorded, or a replay
            gives another result.
        memory: bytes, the peak of forward and backward beyond the inputs.
        forward_flops, both_flops: operations, where they were counted.
        error, gradient_error: against float64, relative to its norm.
        orthogonality: of a matrix max|QᴴQ - I|, of a product max|‖Qx‖/‖x‖ - 1|.
    """

    bench: str
    entry: str
    group: Group
    about: str
    size: str
    dtype: str
    package: str
    status: Status
    reason: str = ""
    forward: float | None = None
    forward_q1: float | None = None
    forward_q3: float | None = None
    forward_mean: float | None = None
    forward_se: float | None = None
    forward_repeats: int | None = None
    both: float | None = None
    both_q1: float | None = None
    both_q3: float | None = None
    both_mean: float | None = None
    both_se: float | None = None
    both_repeats: int | None = None
    both_inline: float | None = None
    both_inline_q1: float | None = None
    both_inline_q3: float | None = None
    both_inline_mean: float | None = None
    both_inline_se: float | None = None
    both_inline_repeats: int | None = None
    forward_graph: float | None = None
    forward_graph_q1: float | None = None
    forward_graph_q3: float | None = None
    forward_graph_mean: float | None = None
    forward_graph_se: float | None = None
    forward_graph_repeats: int | None = None
    both_graph: float | None = None
    both_graph_q1: float | None = None
    both_graph_q3: float | None = None
    both_graph_mean: float | None = None
    both_graph_se: float | None = None
    both_graph_repeats: int | None = None
    memory: int | None = None
    forward_flops: int | None = None
    both_flops: int | None = None
    error: float | None = None
    gradient_error: float | None = None
    orthogonality: float | None = None


def context(device: torch.device, seed: int) -> Context:
    """What measurements on this device, now, belong to."""
    return Context(
        device=str(device),
        device_name=info.device_name(device),
        threads=torch.get_num_threads(),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        python=platform.python_version(),
        torch=torch.__version__,
        cwy=__version__,
        commit=info.commit(),
        seed=seed,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def version(package: str) -> str:
    """The version of an installed package, by the name it is imported by."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """Writes rows to a file that appears whole or not at all."""
    text = io.StringIO(newline="")
    # Texts are quoted, so that none is taken for the end of a line; numbers are written by repr, exactly.
    table = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    inherited = [field.name for field in fields(Context)]
    names = [*(field.name for field in fields(Row) if field.name not in inherited), *inherited]
    table.writerow(names)
    table.writerows([getattr(row, name) for name in names] for row in rows)
    with whole(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        file.write(text.getvalue())
        file.flush()
        os.fsync(file.fileno())


def read_csv(path: Path) -> list[Row]:
    """The rows that :func:`write_csv` wrote, now or before there were as many columns; a file with other columns raises."""
    readers = _readers()
    needed = {field.name for field in fields(Row) if field.default is MISSING}
    with path.open(encoding="utf-8", newline="") as file:
        table = csv.DictReader(file)
        found = set(table.fieldnames or ())
        if odd := sorted((found - readers.keys()) | (needed - found)):
            raise ValueError(f"{path} is not a file of benchmark rows: its columns differ by {', '.join(odd)}.")
        return [Row(**{name: readers[name](text) for name, text in line.items()}) for line in table]


@cache
def _readers() -> dict:
    def reader(kind):
        number = next((one for one in (int, float) if one is kind or one in get_args(kind)), None)
        if number is None:
            return str
        return lambda text: number(text) if text or kind is number else None

    return {name: reader(kind) for name, kind in get_type_hints(Row).items()}
