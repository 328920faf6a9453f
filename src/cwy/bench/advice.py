"""``cwy bench advise``: what was asked, and what the times say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from textwrap import indent

import torch
from rich.console import Console

from ..ops.recurrence.nonlinearities import NONLINEARITIES
from . import Bench, advise, table
from .command import DTYPES, Options, find_device
from .figure import caption
from .peers import near
from .rows import Row
from .sizes import Size
from .timing import QUICK

EFFORT = replace(QUICK, total=120.0, limit=2.0, graphs=False)
FEWER = "16,32,64,128,256"
"""Reflections that are tried beside all N."""


@dataclass(frozen=True)
class Asked:
    """The question, checked; ``options`` are those of the benchmark that answers it."""

    size: Size
    nonlinearity: str
    reflections: tuple[int, ...]
    options: Options


def ask(
    n: int,
    batch: int,
    steps: int | None,
    nonlinearity: str | None,
    reflections: str | None,
    device: str,
    dtype: str,
    threads: int | None,
    seed: int,
) -> Asked:
    """Options as the user wrote them; a mistake raises ValueError with what to do."""
    if nonlinearity is not None and steps is None:
        raise ValueError("--nonlinearity: only a recurrence has one. Give its steps, too: --steps 100.")
    f = nonlinearity or "modrelu"
    if f not in NONLINEARITIES:
        raise ValueError(f"--nonlinearity: {f!r} is not known. {near(f, list(NONLINEARITIES))}")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype: {dtype!r} is not known. {near(dtype, DTYPES)}")
    counts = _counts(reflections or FEWER, n, strict=reflections is not None)
    size = (n, batch) if steps is None else (n, batch, steps)
    what = "A product with a batch of vectors. Methods, reflections and backends."
    if steps is not None:
        what = f"A recurrence over {steps} steps, {f}. Methods, reflections and backends."
    bench = Bench("advise", what, ("NxB", "NxBxT"), "", "", counts=False)
    entries = partial(advise.entries, nonlinearity=f, reflections=counts)
    where, kind = find_device(device), getattr(torch, dtype)
    serves = lambda entry: entry.why_not(kind, where) is None
    chosen = Options(bench, [size], serves, where, kind, EFFORT, threads, seed, entries)
    return Asked(size, f, counts, chosen)


def tell(asked: Asked, rows: Sequence[Row], console: Console, stopped: bool = False) -> None:
    """Shows the table, what got no time and why, and the advice; if it was stopped, among how many."""
    ranked = ranking(rows)
    if not ranked:
        console.print("No candidate was timed: there is nothing to advise.")
        return
    if stopped:
        of = len([entry for entry in asked.options.entries(asked.size) if asked.options.wanted(entry)])
        console.print(f"Stopped: {len(rows)} of {of} were timed. What follows holds among those alone.\n")
    console.print(table.detail(rows, ranked[0].entry, asked.size[2] if len(asked.size) > 2 else None), end="\n\n")
    if any(row.reason for row in rows):
        console.print(table.untimed(rows), end="\n\n")
    if any(row.both_inline for row in rows):
        console.print(table.overview(rows, [asked.size], "both_inline"), end="\n\n")
    for line in advice(asked, rows).splitlines():
        console.print(line, soft_wrap=line.startswith(" "))  # code stays in one piece
    console.print(caption(ranked[0]), style="dim")


def advice(asked: Asked, rows: Sequence[Row]) -> str:
    """The fastest candidates, of all and of some kinds, and how to ask for them; all from these rows."""
    known = {one.name: one for one in advise.candidates(asked.size, asked.reflections)}
    ranked = ranking(rows)
    free = next((row.both for row in rows if row.group == "floor"), None)
    picks = {
        "Fastest": lambda one: True,
        "Fastest with all reflections": lambda one: one.reflections is None,
        "Fastest as the weight of a layer, which forms Q": lambda one: one.how != "unformed",
    }
    told: dict[str, str] = {}
    for title, fits in picks.items():
        row = next((row for row in ranked if fits(known[row.entry])), None)
        if row is not None and row.both and row.entry not in told:
            beside = f", {table.times(row.both / free)} times a free weight" if free else ""
            like = asked.options.dtype, asked.options.device
            code = known[row.entry].code(asked.size, asked.nonlinearity, *like)
            served = known[row.entry].served(asked.size, *like) if len(asked.size) == 2 else ""
            by = f", by the backend {served!r} of wy" if served else ""
            level = [other.entry for other in ranked if other is not row and fits(known[other.entry]) and _overlap(row, other)]
            tie = f" Its quartiles overlap with those of {'; '.join(level)}." if level else ""
            told[row.entry] = f"{title}: {row.entry}, {table.ms(row.both)} ms forward + backward{beside}{by}.{tie}"
            told[row.entry] += f"\n{indent(code, '    ')}"
    inline = min((row for row in ranked if row.both_inline), key=lambda row: row.both_inline or inf, default=None)
    if inline and inline.both_inline and inline.both_inline < 0.8 * (ranked[0].both or 0.0):
        told[""] = (
            f"In one thread, with torch.autograd.set_multithreading_enabled(False), the fastest is {inline.entry}, "
            f"{table.ms(inline.both_inline)} ms: autograd's own thread costs more than it gains."
        )
    return "\n".join(told.values())


def _overlap(fast: Row, slow: Row) -> bool:
    return (slow.both_q1 or inf) <= (fast.both_q3 or 0)


def ranking(rows: Sequence[Row]) -> list[Row]:
    """The rows of candidates that have a time, the fastest first."""
    return sorted((row for row in rows if row.group == "ours" and row.both), key=lambda row: row.both or 0.0)


def _counts(text: str, n: int, strict: bool) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"--reflections: {text!r} is not a list of whole numbers, as in '16,64'.")
    counts = sorted({int(part) for part in parts})
    if strict and counts[-1] > n:
        raise ValueError(f"--reflections: {counts[-1]} is above N = {n}. Give numbers from 1 to {n}.")
    return tuple(count for count in counts if count < n)
