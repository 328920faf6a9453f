"""Put the numbers of committed records into pages.

A page writes ``{{ ms("h200/model", "1024x12x512", "cwy") }}`` where a number belongs. The docs
build fills it in. In README, which no build touches, a block holds the template and its result:

    <!-- numbers: {{ ms("h200/model", "1024x12x512", "cwy") }} ms -->17.6 ms<!-- /numbers -->

``python docs/_hooks/record_numbers.py README.md`` writes the results again. With ``--check`` it
fails where a result differs from the records.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import record_values as values
import translation_numbers as translation
from jinja2 import Environment, StrictUndefined
from record_values import RESULTS, NumberError, over_runs

from cwy.bench.output import tables
from cwy.experiments.report import words

MACRO = re.compile(r"{{ (.+?) }}", re.DOTALL)
CLAIM = re.compile(r'^\| (.+?) \| .*{{ verdict\("([^"]+)"\) }}', re.MULTILINE)
"""A row of the Results page: what the paper claims, and whether we found it."""
BLOCK = re.compile(r"(<!-- numbers:(.*?)-->)(.*?)(<!-- /numbers -->)", re.DOTALL)


def lines(labels: Mapping[str, str], cells: Sequence[str]) -> str:
    """Write the rows of a table: of each label the cells, macros in which @ is the label's word."""
    rows = []
    for label, word in labels.items():
        filled = [fill("{{ " + cell.replace("@", word) + " }}", label) for cell in cells]
        rows.append(f"| {label} | {' | '.join(filled)} |")
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


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        lines,
        paper,
        reproduced,
        translation.at_recipe,
        translation.common_best,
        translation.lower_points,
        translation.of_lstm,
        translation.of_paper,
        translation.with_every_word,
        translation.parameters_of_lstm,
        translation.recipe_to_best_epoch,
        translation.searched,
        translation.step_ms,
        translation.to_best_epoch,
        translation.to_loss_by_seed,
        translation.to_loss_of_lstm,
        translation.tuned,
        values.goal,
        values.later_step,
        values.line,
        values.ms,
        values.quoted,
        values.ratio,
        values.record,
        values.row,
        values.runs,
        values.seconds,
        values.sentences,
        values.swept,
        values.swept_last,
        values.swept_seeds,
        values.swept_test,
        values.us,
    )
}
"""The macros by their names."""
FILTERS: dict[str, Callable[..., Any]] = {
    "duration": over_runs(words.duration),
    "fixed": values.fixed,
    "ms": over_runs(tables.ms),
    "number": over_runs(words.number),
    "percent": over_runs(words.percent),
    "share": over_runs("{:.0%}".format),
    "times": over_runs(tables.times),
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
