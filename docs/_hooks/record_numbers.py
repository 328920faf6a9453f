"""Put the numbers of committed records into pages.

A page writes ``{{ ms("h200/model", "1024x12x512", "cwy") }}`` where a number belongs. The docs
build fills it in. In README, which no build touches, a block holds the template and its result:

    <!-- numbers: {{ ms("h200/model", "1024x12x512", "cwy") }} ms -->17.6 ms<!-- /numbers -->

``python docs/_hooks/record_numbers.py README.md`` writes the results again. With ``--check`` it
fails where a result differs from the records.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

from jinja2 import Environment, StrictUndefined

from cwy.bench.output import tables
from cwy.bench.output.rows import Measurement, read
from cwy.experiments.report import Run, read_run, words

RESULTS = Path(__file__).parents[2] / "results"
MACRO = re.compile(r"{{ (.+?) }}", re.DOTALL)
CLAIM = re.compile(r'^\| (.+?) \| .*{{ verdict\("([^"]+)"\) }}', re.MULTILINE)
"""A row of the Results page: what the paper claims, and whether we found it."""
BLOCK = re.compile(r"(<!-- numbers:(.*?)-->)(.*?)(<!-- /numbers -->)", re.DOTALL)


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


PACE = "h200/translation-pace"
"""The file with the times of translation's training steps."""


def step_ms(
    network: str, kind: str = "graph", precision: str = "float32", file: str = PACE
) -> float:
    """Return the milliseconds of a training step of translation, "plain" or as a "graph"."""
    return line(file, f"{network} {precision}")[f"{kind}_ms"]


SEARCHED = {"float32": "nmt/float32-decay", "bfloat16": "nmt/tuned-decay"}
"""How the names of runs at the best points of the second search begin, by their precision."""


def searched(network: str, precision: str) -> Runs:
    """Return the runs of a network of translation at its best point of the second search."""
    return runs(f"{SEARCHED[precision]}-{network}-seed*")


def common_best(networks: Sequence[str], setting: str) -> float:
    """Return a setting of the best point of the second search, which these networks share."""
    best = {}
    for network in networks:
        ended = [
            one
            for name, one in _lines("h200/translation-tune-decay").items()
            if name.startswith(f"tuning-decay/{network}-") and one["status"] == "finished"
        ]
        if not ended:
            raise NumberError(f"translation-tune-decay.jsonl has no finished run of {network!r}.")
        best[network] = min(ended, key=_lowest)
    points = {one["run"].rpartition("-")[2] for one in best.values()}
    if len(points) != 1:
        raise NumberError(f"{', '.join(networks)} have no common best point.")
    return best[networks[0]]["config"][setting]


def of_lstm(network: str, kind: str, precision: str, file: str = PACE) -> str:
    """Write the time of a training step of translation as a percentage of the LSTM's."""
    own = step_ms(network, kind, precision, file)
    return _share(own, step_ms("lstm", kind, precision, file))


def plain_of_lstm(network: str, precision: str) -> str:
    """Write the share of the LSTM's time in plain calls, now and as measured earlier."""
    files = (PACE, f"{PACE}-earlier")
    shares = [of_lstm(network, "plain", precision, file) for file in files]
    return " and ".join(dict.fromkeys(shares))


def to_best_epoch(network: str, precision: str) -> str:
    """Write the time of all steps up to the best epoch as a percentage of the LSTM's."""

    def time(one: str) -> float:
        epochs = searched(one, precision).lowest_epoch("loss", "validation")
        return step_ms(one, "graph", precision) * epochs.mean

    return _share(time(network), time("lstm"))


def to_loss_of_lstm(network: str, precision: str) -> str:
    """Write the time of all steps up to the LSTM's lowest validation loss, as a percentage.

    The whole is the time that the LSTM takes to this loss. Both have the same seed, and the
    percentage is of the means over the seeds.
    """
    own = []
    theirs = []
    pairs = zip(searched(network, precision).runs, searched("lstm", precision).runs, strict=True)
    for run, lstm in pairs:
        epochs, losses = lstm.curve("validation", "loss", "epoch")
        goal = min(losses)
        theirs.append(epochs[losses.index(goal)])
        reached = [
            epoch
            for epoch, loss in zip(*run.curve("validation", "loss", "epoch"), strict=True)
            if loss <= goal
        ]
        if not reached:
            raise NumberError(f"{run.folder.name} never has the LSTM's lowest validation loss.")
        own.append(reached[0])
    time = step_ms(network, "graph", precision) * mean(own)
    return _share(time, step_ms("lstm", "graph", precision) * mean(theirs))


def parameters_of_lstm(network: str) -> str:
    """Write the parameters of a network of translation as a percentage of the LSTM's."""
    own = searched(network, "bfloat16").of_record("parameters")
    return _share(own.mean, searched("lstm", "bfloat16").of_record("parameters").mean)


def _share(value: float, whole: float) -> str:
    return f"{100 * value / whole:.0f}%"


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


def lines(labels: Mapping[str, str], cells: Sequence[str]) -> str:
    """Write the rows of a table: of each label the cells, macros in which @ is the label's word."""
    rows = []
    for label, word in labels.items():
        filled = [fill("{{ " + cell.replace("@", word) + " }}", label) for cell in cells]
        rows.append(f"| {label} | {' | '.join(filled)} |")
    return "\n".join(rows)


def _lines(file: str) -> dict[str, Any]:
    """Return the records of ``results/bench/<file>.jsonl`` by the names of their runs."""
    text = (RESULTS / "bench" / f"{file}.jsonl").read_text(encoding="utf-8")
    return {one["run"]: one for one in map(json.loads, text.splitlines())}


def line(file: str, run: str) -> Mapping[str, Any]:
    """Return the record of one run, a line of ``results/bench/<file>.jsonl``."""
    records = _lines(file)
    if run not in records:
        raise NumberError(f"{file}.jsonl has no run {run!r}, only {', '.join(records)}.")
    return records[run]


def _lowest(found: Mapping[str, Any]) -> float:
    """Return the lowest validation loss of a run of a sweep."""
    if found["status"] != "finished":
        raise NumberError(f"{found['run']} has not finished.")
    return found["best"]["value"]


def swept(file: str, run: str) -> str:
    """Write the lowest validation loss of one run of a sweep, or that it diverged."""
    found = line(file, run)
    if found["status"] == "diverged":
        return "diverges"
    loss = _lowest(found)
    if loss < 10:
        return fixed(loss, 2)
    return fixed(loss, 0)


def swept_seeds(file: str, run: str) -> Values:
    """Return the lowest validation losses of runs of a sweep that differ by their seed."""
    seeds = [one for name, one in _lines(file).items() if name.startswith(f"{run}-seed")]
    found = [_lowest(one) for one in seeds]
    if not found:
        raise NumberError(f"{file}.jsonl has no run {run!r} with a seed.")
    return Values(tuple(found))


def swept_last(file: str, run: str, metric: str) -> Values:
    """Return a last validation metric of runs of a sweep that differ by their seed."""
    seeds = [one for name, one in _lines(file).items() if name.startswith(f"{run}-seed")]
    if not seeds:
        raise NumberError(f"{file}.jsonl has no run {run!r} with a seed.")
    return Values(tuple(one["final"]["validation"][metric] for one in seeds))


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


def reproduced() -> str:
    """Write the claims of the paper and their verdicts, as the Results page has them."""
    page = (RESULTS.parent / "docs" / "results.md").read_text(encoding="utf-8")
    found = CLAIM.findall(page)
    if not found:
        raise NumberError("docs/results.md has no claim with a verdict.")
    return "\n".join(f"| {fill(claim, 'results.md')} | {verdict} |" for claim, verdict in found)


def paper(number: str) -> str:
    """Mark a number as published by others, which no record here holds."""
    return number


def _over_runs(write: Callable[[float], str]) -> Callable[[float | Values], str]:
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
    return _over_runs(lambda one: f"{one:,.{digits}f}")(value)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "common_best": common_best,
    "goal": goal,
    "later_step": later_step,
    "line": line,
    "lines": lines,
    "ms": ms,
    "of_lstm": of_lstm,
    "paper": paper,
    "parameters_of_lstm": parameters_of_lstm,
    "plain_of_lstm": plain_of_lstm,
    "quoted": quoted,
    "ratio": ratio,
    "record": record,
    "reproduced": reproduced,
    "row": row,
    "runs": runs,
    "searched": searched,
    "seconds": seconds,
    "sentences": sentences,
    "step_ms": step_ms,
    "swept": swept,
    "swept_last": swept_last,
    "swept_seeds": swept_seeds,
    "to_best_epoch": to_best_epoch,
    "to_loss_of_lstm": to_loss_of_lstm,
    "us": us,
}
FILTERS: dict[str, Callable[..., Any]] = {
    "duration": _over_runs(words.duration),
    "fixed": fixed,
    "ms": _over_runs(tables.ms),
    "number": _over_runs(words.number),
    "percent": _over_runs(words.percent),
    "share": _over_runs("{:.0%}".format),
    "times": _over_runs(tables.times),
}


def fill(text: str, where: str, more: Mapping[str, Callable[..., Any]] | None = None) -> str:
    """Replace each macro of a text by its value. One that has none raises."""
    environment = Environment(undefined=StrictUndefined, autoescape=False)  # noqa: S701
    environment.filters |= FILTERS

    def value(macro: re.Match[str]) -> str:
        try:
            compiled = environment.compile_expression(macro[1], undefined_to_none=False)
            found = compiled(**FUNCTIONS, **(more or {}))
        except Exception as error:
            raise NumberError(f"{where}: {macro[0]}: {error}") from error
        if not isinstance(found, str):
            raise NumberError(f"{where}: {macro[0]} is no text. Add a filter, as in `| fixed(2)`.")
        return found

    return MACRO.sub(value, text)


def written(text: str, where: str) -> str:
    """Return a text whose blocks of numbers are written again."""

    def block(found: re.Match[str]) -> str:
        return found[1] + fill(found[2], where).removeprefix(" ").rstrip(" ") + found[4]

    return BLOCK.sub(block, text)


UNITS = r"(?:ms|µs|s|min|hours?|minutes?|seconds?|GB|MB|kB|nats|BLEU|M|×|%|times|points?)"
MEASURED = re.compile(rf"(?<![\w.\-/])\d[\d,]*(?:\.\d+(?:e-?\d+)?|(?= ?{UNITS}(?!\w)))")
"""A number with decimals, or one with a unit that is measured."""
ELSEWHERE = (
    r"```.*?```",
    r"<!-- numbers:.*?<!-- /numbers -->",
    r"{{ .+? }}",
    r"`[^`\n]*`",
    r"\$[^$]*\$",
    r"\]\([^)]*\)",
    r"<[^>]*>",
    r"(?:Python|torch|PyTorch|CUDA|cwy|JAX|capability) \d[\w.]*(?:(?:,| and| to) \d[\w.]*)*",
)
"""What is code, maths, a link, a version, or filled in from records."""


def typed_by_hand(text: str) -> Iterator[str]:
    """Return what looks like a measured number and is not filled in, with its surroundings."""
    for pattern in ELSEWHERE:
        text = re.sub(pattern, lambda found: " " * len(found[0]), text, flags=re.DOTALL)
    for found in MEASURED.finditer(text):
        around = text[max(0, found.start() - 40) : found.end() + 15]
        yield " ".join(around.split())


def main() -> None:
    """Write the blocks of the pages that the arguments name, or check them."""
    paths = [Path(argument) for argument in sys.argv[1:] if argument != "--check"]
    stale = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        again = written(text, path.name)
        if "--check" not in sys.argv:
            path.write_text(again, encoding="utf-8")
        elif again != text:
            stale.append(path.name)
    if stale:
        sys.exit(f"{', '.join(stale)} and the records disagree. Run: make readme")


if __name__ == "__main__":
    main()
