"""Rows: one per entry, size and kind of time, with everything it depends on.

In memory a :class:`Measurement` holds all that was measured of one entry at one size. On disk it
is one CSV row per kind of time: what the rows of a measurement share is repeated in each of them.
An entry without any time is one row without a kind.
"""

from __future__ import annotations

import csv
import io
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from ... import __version__, _atomic, _provenance
from ..suites import Bench, Size, parse_sizes, show_size

Status = Literal["ok", "failed", "skipped", "missing"]

KINDS = {
    "forward": "Forward",
    "both": "Forward + backward",
    "both_inline": "Forward + backward in one thread",
    "both_blocked": "Forward + backward, waiting for each call",
    "both_repeated": "Forward + backward, repeated in one program",
    "forward_graph": "Forward as a CUDA graph",
    "both_graph": "Forward + backward as a CUDA graph",
}
"""The kinds of time, with their titles.

``both_inline`` runs the backward pass, on a GPU, in the thread that asks for it. In JAX
``both_blocked`` waits for every result, and ``both_repeated`` is a part of one program that repeats
both passes. The kinds that end in ``_graph`` replay the call as a CUDA graph.
"""


@dataclass(frozen=True)
class Context:
    """Describe where a measurement comes from.

    Attributes:
        threads: of the CPU.
        load: how many processes wanted the CPU in the minute before.
        commit: of cwy's source, "+dirty" if it was changed since, empty outside a git checkout.
        command: the command line that made the measurement, empty if none did.
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
    command: str = ""


@dataclass(frozen=True)
class Time:
    """Hold one kind of time: seconds per call, over some samples.

    Attributes:
        median, q1, q3: the median and the quartiles.
        mean, se: the mean and its standard error.
        repeats: the number of samples.
        flops: operations per call, where they were counted.
    """

    median: float
    q1: float | None = None
    q3: float | None = None
    mean: float | None = None
    se: float | None = None
    repeats: int | None = None
    flops: int | None = None


@dataclass(frozen=True)
class Measurement:
    """Hold all that was measured of one entry at one size.

    Attributes:
        bench, entry, group, about: what was timed.
        size: as the command line takes it, e.g. "4096x64".
        dtype: of the result.
        package: what the entry needs, with its version: "geotorch 0.4.0".
        status: "ok", "failed" (its check, or with an exception), "skipped" (too slow, or it cannot
            serve the size) or "missing" (not installed).
        context: the device, versions, seed and command.
        reason: why there are no times, empty if there are.
        times: by kind. A kind that was not measured is absent.
        ungraphed: by kind, why a time as a CUDA graph is absent.
        memory: bytes, the peak of forward and backward beyond the inputs.
        error, gradient_error: against float64, relative to its norm.
        orthogonality: of a matrix max|QᴴQ - I|, of a product max|‖Qx‖/‖x‖ - 1|.
    """

    bench: str
    entry: str
    group: str
    about: str
    size: str
    dtype: str
    package: str
    status: Status
    context: Context
    reason: str = ""
    times: Mapping[str, Time] = field(default_factory=dict)
    ungraphed: Mapping[str, str] = field(default_factory=dict)
    memory: int | None = None
    error: float | None = None
    gradient_error: float | None = None
    orthogonality: float | None = None

    def seconds(self, kind: str) -> float | None:
        """Return the median of one kind of time, None if it was not measured."""
        if kind in self.times:
            return self.times[kind].median
        return None

    def flops(self, kind: str) -> int | None:
        """Return the operations of one kind of time, None if they are not known."""
        if kind in self.times:
            return self.times[kind].flops
        return None

    def standing(self, kind: str) -> Time | None:
        """Return the time that tables and pictures show for a kind.

        A step on the manifold has no backward pass, so its forward time is shown for both.
        """
        if "both" not in self.times:
            kind = kind.replace("both", "forward").removesuffix("_inline")
        return self.times.get(kind)

    @property
    def ranked(self) -> float | None:
        """Return the seconds that an entry is ranked by: forward and backward, or what it has."""
        time = self.standing("both")
        if time is None:
            return None
        return time.median


@dataclass(frozen=True)
class Panel:
    """Hold the sizes of one form, which share a table and a picture, and their measurements."""

    form: str
    sizes: Sequence[Size]
    found: Sequence[Measurement]

    def at(self, size: Size) -> list[Measurement]:
        """Return the measurements at one size."""
        return [one for one in self.found if one.size == show_size(size)]


def panels(bench: Bench, found: Sequence[Measurement]) -> Iterator[Panel]:
    """Sort measurements by the form of their sizes. Sizes without any time are left out."""
    timed = dict.fromkeys(one.size for one in found if one.status == "ok")
    if not timed:
        return
    sizes = parse_sizes(",".join(timed), bench.forms)
    for form in bench.forms:
        alike = [size for size in sizes if len(size) == form.count("x") + 1]
        names = [show_size(size) for size in alike]
        if alike:
            yield Panel(form, alike, [one for one in found if one.size in names])


def context(device: torch.device, seed: int, command: str = "") -> Context:
    """Describe measurements that are made on this device, now."""
    return Context(
        device=str(device),
        device_name=_provenance.device_name(device),
        threads=torch.get_num_threads(),
        load=round(psutil.getloadavg()[0], 2),
        python=platform.python_version(),
        torch=torch.__version__,
        cwy=__version__,
        commit=_provenance.commit(),
        seed=seed,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
    )


def caption(where: Context, dtype: str) -> str:
    """Describe in one line what numbers belong to."""
    commit = ""
    if where.commit:
        commit = f" ({where.commit})"
    return (
        f"{machine(where)}; cwy {where.cwy}{commit}, torch {where.torch}, {dtype}, "
        f"seed {where.seed}, {where.date[:10]}"
    )


def machine(where: Context) -> str:
    """Name the device and, of a CPU, the threads."""
    if where.device != "cpu":
        return where.device_name
    plural = "s" * (where.threads > 1)
    return f"{where.device_name}, {where.threads} thread{plural}"


_SHARED = ("bench", "entry", "group", "about", "size", "dtype", "package")
_ONCE = ("memory", "error", "gradient_error", "orthogonality")
_TIME = tuple(one.name for one in fields(Time))
_CONTEXT = tuple(one.name for one in fields(Context))
COLUMNS = (*_SHARED, "kind", "status", "reason", *_TIME, *_ONCE, *_CONTEXT)
"""The columns of a file of rows."""
_WHOLE_NUMBERS = ("repeats", "flops", "memory", "threads", "seed")
_NUMBERS = ("median", "q1", "q3", "mean", "se", *_ONCE[1:], "load")


def write(found: Iterable[Measurement], path: Path) -> None:
    """Write measurements to a file that appears whole or not at all."""
    text = io.StringIO(newline="")
    # Texts are quoted, so that none ends a line. Numbers are written by repr, exactly.
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    table.writeheader()
    for one in found:
        table.writerows(_rows(one))
    _atomic.write(path, text.getvalue().encode())


def read(path: Path) -> list[Measurement]:
    """Read the measurements that :func:`write` wrote. A file with other columns raises."""
    with path.open(encoding="utf-8", newline="") as file:
        table = csv.DictReader(file)
        odd = sorted(set(COLUMNS) ^ set(table.fieldnames or ()))
        if odd:
            raise ValueError(
                f"{path} is not a file of benchmark rows: its columns differ by {', '.join(odd)}."
            )
        rows = [{name: _parsed(name, text) for name, text in line.items()} for line in table]
    grouped = groupby(rows, key=lambda row: (row["bench"], row["entry"], row["size"]))
    return [_measurement(list(group)) for _, group in grouped]


def _rows(one: Measurement) -> Iterator[dict[str, Any]]:
    shared: dict[str, Any] = {name: getattr(one, name) for name in (*_SHARED, *_ONCE)}
    shared |= asdict(one.context)
    shared |= {"status": one.status, "reason": one.reason}
    if not one.times:
        yield shared | {"kind": ""}
    for kind, time in one.times.items():
        yield shared | {"kind": kind} | asdict(time)
    for kind, reason in one.ungraphed.items():
        yield shared | {"kind": kind, "status": "skipped", "reason": reason}


def _measurement(rows: Sequence[Mapping[str, Any]]) -> Measurement:
    first = rows[0]
    timed = [row for row in rows if row["median"] is not None]
    return Measurement(
        **{name: first[name] for name in (*_SHARED, *_ONCE, "status", "reason")},
        context=Context(**{name: first[name] for name in _CONTEXT}),
        times={row["kind"]: Time(**{name: row[name] for name in _TIME}) for row in timed},
        ungraphed={row["kind"]: row["reason"] for row in rows[1:] if row not in timed},
    )


def _parsed(name: str, text: str) -> str | int | float | None:
    if name not in (*_WHOLE_NUMBERS, *_NUMBERS):
        return text
    if not text:
        return None
    if name in _WHOLE_NUMBERS:
        return int(text)
    return float(text)
