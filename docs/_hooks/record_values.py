"""Look up the numbers of committed records, and write them as pages show them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

from cwy.bench.output import tables
from cwy.bench.output.rows import Measurement, read
from cwy.experiments.report import Run, read_run

RESULTS = Path(__file__).parents[2] / "results"


class NumberError(LookupError):
    """Report a macro that no record answers. The message names it and what there is."""


@dataclass(frozen=True)
class Values:
    """Hold one number per run. A filter writes their mean, the lowest and the highest."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Return the mean over the runs."""
        return mean(self.values)

    @property
    def low(self) -> float:
        """Return the lowest."""
        return min(self.values)

    @property
    def high(self) -> float:
        """Return the highest."""
        return max(self.values)


@cache
def _rows(file: str) -> list[Measurement]:
    path = RESULTS / "bench" / f"{file}.csv"
    if not path.exists():
        raise NumberError(f"there is no record results/bench/{file}.csv.")
    return read(path)


def row(file: str, size: str, entry: str) -> Measurement:
    """Return the row of one entry at one size of ``results/bench/<file>.csv``."""
    found = [one for one in _rows(file) if (one.size, one.entry) == (size, entry)]
    if not found:
        sizes = ", ".join(dict.fromkeys(one.size for one in _rows(file)))
        entries = ", ".join(dict.fromkeys(one.entry for one in _rows(file)))
        raise NumberError(
            f"{file}.csv has no entry {entry!r} at {size!r}. Its sizes: {sizes}. "
            f"Its entries: {entries}."
        )
    return found[0]


def seconds(file: str, size: str, entry: str, kind: str = "both") -> float:
    """Return the median seconds of a call, forward + backward unless ``kind`` names another."""
    time = row(file, size, entry).standing(kind)
    if time is None:
        raise NumberError(f"{entry!r} has no time {kind!r} at {size!r} in {file}.csv.")
    return time.median


def ms(file: str, size: str, entry: str, kind: str = "both") -> str:
    """Write the milliseconds of a call."""
    return tables.ms(seconds(file, size, entry, kind))


def us(file: str, size: str, entry: str, kind: str = "both") -> str:
    """Write the microseconds of one of the T steps of a recurrence."""
    steps = int(size.rpartition("x")[2])
    return tables.ms(seconds(file, size, entry, kind) / steps * 1e3)


def ratio(file: str, size: str, entry: str, other: str, kind: str = "both") -> str:
    """Write how many times as long an entry takes as another one."""
    return tables.times(seconds(file, size, entry, kind) / seconds(file, size, other, kind))


def goal(value: float, limit: float) -> str:
    """Write whether a number is within its goal."""
    if value <= limit:
        return "met"
    return "missed"


@dataclass(frozen=True)
class Runs:
    """Hold finished runs that differ by their seed."""

    runs: tuple[Run, ...]

    @property
    def count(self) -> str:
        """Write how many runs there are."""
        return str(len(self.runs))

    def _over(self, value: Callable[[Run], float | None]) -> Values:
        found = [value(run) for run in self.runs]
        if any(one is None for one in found):
            raise NumberError(f"{self.runs[0].folder.name}: a run has no such number.")
        return Values(tuple(one for one in found if one is not None))

    def last(self, metric: str, split: str = "test") -> Values:
        """Return the last logged value of a metric."""
        return self._over(lambda run: run.last(split, metric))

    def first(self, metric: str, split: str = "test") -> Values:
        """Return the first logged value of a metric."""
        return self._over(lambda run: run.curve(split, metric)[1][0])

    def highest(self, metric: str, split: str = "test") -> Values:
        """Return the highest logged value of a metric."""
        return self._over(lambda run: max(run.curve(split, metric)[1]))

    def lowest(self, metric: str, split: str = "test") -> Values:
        """Return the lowest logged value of a metric."""
        return self._over(lambda run: min(run.curve(split, metric)[1]))

    def lowest_epoch(self, metric: str, split: str = "test") -> Values:
        """Return the epoch after which a metric was lowest."""
        curves = [run.curve(split, metric, "epoch") for run in self.runs]
        return Values(tuple(epochs[values.index(min(values))] for epochs, values in curves))

    def at_epoch(self, epoch: int, metric: str, split: str = "test") -> Values:
        """Return the value of a metric after an epoch."""
        curves = [dict(zip(*run.curve(split, metric, "epoch"), strict=True)) for run in self.runs]
        return Values(tuple(curve[epoch] for curve in curves))

    def crossing(self, level: float) -> Values:
        """Return the first iteration with a training loss at or under a level."""
        return self._over(lambda run: run.crossing(level))

    def of_record(self, key: str) -> Values:
        """Return a number of the records, as ``seconds``, ``parameters`` or ``peak_memory``."""
        return self._over(lambda run: (run.record or {}).get(key))


@cache
def runs(pattern: str) -> Runs:
    """Return the finished runs of folders, as ``runs("mnist/170-cwy-seed*")``."""
    found = [read_run(path.parent) for path in sorted(RESULTS.glob(f"{pattern}/record.json"))]
    if not found:
        raise NumberError(f"no finished run is results/{pattern}.")
    return Runs(tuple(found))


def record(folder: str, *keys: str) -> Any:
    """Return a value of a run's record, as ``record("kth/running-tcwy-seed0", "device")``."""
    found: Any = json.loads((RESULTS / folder / "record.json").read_text(encoding="utf-8"))
    for key in keys:
        found = found[key]
    return found


def later_step(run: str) -> str:
    """Write the median milliseconds per step of a video run, over its second half."""
    steps = line("h200/video-speed", run)["step_ms"]
    return fixed(median(steps[len(steps) // 2 :]), 0)


def lines_of(file: str) -> dict[str, Any]:
    """Return the records of ``results/bench/<file>.jsonl`` by the names of their runs."""
    text = (RESULTS / "bench" / f"{file}.jsonl").read_text(encoding="utf-8")
    return {one["run"]: one for one in map(json.loads, text.splitlines())}


def line(file: str, run: str) -> Mapping[str, Any]:
    """Return the record of one run, a line of ``results/bench/<file>.jsonl``."""
    records = lines_of(file)
    if run not in records:
        raise NumberError(f"{file}.jsonl has no run {run!r}, only {', '.join(records)}.")
    return records[run]


def lowest(found: Mapping[str, Any]) -> float:
    """Return the lowest validation loss of a run of a sweep."""
    if found["status"] != "finished":
        raise NumberError(f"{found['run']} has not finished.")
    return found["best"]["value"]


def swept(file: str, run: str) -> str:
    """Write the lowest validation loss of one run of a sweep, or that it diverged."""
    found = line(file, run)
    if found["status"] == "diverged":
        return "diverges"
    loss = lowest(found)
    if loss < 10:
        return fixed(loss, 2)
    return fixed(loss, 0)


def _swept_seeds(file: str, run: str) -> list[Mapping[str, Any]]:
    """Return the records of a sweep's runs that differ by their seed."""
    found = [one for name, one in lines_of(file).items() if name.startswith(f"{run}-seed")]
    if not found:
        raise NumberError(f"{file}.jsonl has no run {run!r} with a seed.")
    return found


def swept_seeds(file: str, run: str) -> Values:
    """Return the lowest validation losses of runs of a sweep that differ by their seed."""
    return Values(tuple(lowest(one) for one in _swept_seeds(file, run)))


def swept_last(file: str, run: str, metric: str) -> Values:
    """Return a last validation metric of runs of a sweep that differ by their seed."""
    found = _swept_seeds(file, run)
    return Values(tuple(one["final"]["validation"][metric] for one in found))


def swept_test(file: str, run: str, metric: str) -> Values:
    """Return a metric of test pairs, of runs of a sweep that differ by their seed."""
    return Values(tuple(one["final"]["test"][metric] for one in _swept_seeds(file, run)))


def quoted(file: str, where: str, number: str) -> str:
    """Return a number that stands, as it is written, in a line of a text under results/bench.

    ``where`` are words of that line.
    """
    lines = (RESULTS / "bench" / file).read_text(encoding="utf-8").splitlines()
    for one in lines:
        if where in one and re.search(rf"(?<![\w.]){re.escape(number)}(?![\w.]*\d)", one):
            return number
    raise NumberError(f"no line of results/bench/{file} has {where!r} and {number!r}.")


def sentences(file: str, count: int) -> str:
    """Write the first rows of a table of translations, tab-separated under ``results``."""
    text = (RESULTS / file).read_text(encoding="utf-8")
    rows = []
    for row in text.splitlines()[1 : count + 1]:
        # Punctuation is a word of its own in the data.
        joined = re.sub(r" (?=[.,?!])|(?<=[¿¡]) ", "", row)
        cells = " | ".join(joined.split("\t"))
        rows.append(f"| {cells} |")
    return "\n".join(rows)


def over_runs(write: Callable[[float], str]) -> Callable[[float | Values], str]:
    """Return what writes a number, or the mean of several with the lowest and the highest."""

    def written(value: float | Values) -> str:
        if not isinstance(value, Values):
            return write(value)
        low = write(value.low)
        high = write(value.high)
        if low == high:
            return write(value.mean)
        return f"{write(value.mean)} ({low.rstrip('%')} to {high.rstrip('%')})"

    return written


def fixed(value: float | Values, digits: int) -> str:
    """Write a number with so many decimals."""
    return over_runs(lambda one: f"{one:,.{digits}f}")(value)
