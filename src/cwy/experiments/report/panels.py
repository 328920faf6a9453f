"""Sort runs into panels of one task and size, and these into series of one method and setting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any

from ..engine.config import as_given
from ..engine.files import slug
from .describe import Config, Curve, Description, Series, describe
from .runs import Run
from .words import number, say

INCIDENTAL = {"seed", "recipe", "device", "compile", "log_every", "save_every"}
"""Settings that may differ between two runs of one series."""
DATA = "data"
"""The name of what a run learned from, next to its settings. It is a hash, if the run has one."""
SHOWN_HASH = 12
"""The letters of a hash that are shown."""
ALWAYS_NAMED = {"reflections", "nonlinearity"}
"""Settings that every label of a method has if its runs differ by them."""
LETTERS = {"hidden_size": "N", "reflections": "L"}
ORDER = (
    *("cwy", "tcwy", "hr", "exprnn", "dtriv", "scornn", "urnn", "eurnn", "own"),
    *("rgd", "rgd-c-c", "rgd-e-c", "rgd-c-qr", "rgd-e-qr", "rgd-adam"),
    *("orth-init", "glorot", "zeros", "lstm", "gru", "rnn", "convlstm"),
)
"""The order of rows and legends. Other methods follow by name."""
LONGEST = 60
"""The most characters of a setting that a legend shows."""
_UNUSED = object()
"""The value of a setting that means nothing to a run."""
_AS_LR = object()
"""The value of an orthogonal_lr that equals the lr."""


@dataclass(frozen=True)
class Panel:
    """Hold series that are drawn in the same figures and compared in the same table."""

    task: str
    description: Description
    series: list[Series]
    unnamed: Sequence[str] = ()
    """For each method whose labels leave settings out, what these are."""
    number: int = 1
    """Which of the panels with the same name in files it is."""

    @property
    def config(self) -> Config:
        """Return the settings of its first run."""
        return self.series[0].config

    @property
    def title(self) -> str:
        """Return the task and the sizes of this panel, as in "Copying, T = 1000"."""
        parts = [self.description.title]
        for letter, value in self._sizes.items():
            part = str(value)
            if letter:
                part = f"{letter} = {value}"
            parts.append(part)
        return ", ".join(parts)

    @property
    def slug(self) -> str:
        """Return its name in file names and links, as in "copying-T1000"."""
        sizes = [f"{letter}{value}" for letter, value in self._sizes.items()]
        name = slug("-".join([self.task, *sizes]))
        if self.number > 1:
            name += f"-{self.number}"
        return name

    @property
    def _sizes(self) -> dict[str, object]:
        values = {letter: self.config.get(key) for key, letter in self.description.panels.items()}
        return {letter: value for letter, value in values.items() if value is not None}

    @property
    def finding(self) -> str:
        """Return what the finished runs show, and which series have none, in a sentence."""
        ended = []
        diverged = []
        going = []
        for one in self.series:
            runs = [run for run in one.runs if run.record]
            if runs:
                ended.append(replace(one, runs=runs))
            elif all(run.status == "diverged" for run in one.runs):
                diverged.append(one)
            else:
                going.append(one)
        clauses = []
        if ended:
            clauses.append(self.description.finding(ended))
        if len(going) > 3:
            clauses.append(f"{len(going)} others are not finished")
        elif going:
            clauses.append(say(going, self.series, "is not finished", "are not finished"))
        if diverged:
            clauses.append(say(diverged, self.series, "diverged", "diverged"))
        return ". ".join(clauses)

    @property
    def runs(self) -> list[Run]:
        """Return every run."""
        return [run for series in self.series for run in series.runs]

    def drawn(self, curve: Curve) -> list[Series]:
        """Return the series with something to draw.

        There are none if every curve is a point and another figure has more: the table has those
        numbers.
        """
        others = [one for one in self.description.curves if one is not curve]
        if self._most_points(curve) == 1 and any(self._most_points(one) > 1 for one in others):
            return []
        return [one for one in self.series if _points(one, curve)]

    def _most_points(self, curve: Curve) -> int:
        return max(_points(one, curve) for one in self.series)


def _points(series: Series, curve: Curve) -> int:
    """Return the points of the longest curve of a series."""
    curves = [run.curve(curve.split, curve.metric, curve.along)[0] for run in series.runs]
    return max(map(len, curves))


def arrange(runs: Iterable[Run]) -> list[Panel]:
    """Return the panels of these runs by task and size, with their series in the order of ORDER."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        keys = describe(run.task).panels
        groups.setdefault((run.task, *(run.config.get(key) for key in keys)), []).append(run)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], *map(_order, item[0][1:])))
    panels = []
    for key, members in ordered:
        labels = _labels(members)
        unnamed = [one.unnamed for one in labels.values() if one.unnamed]
        panels.append(Panel(key[0], describe(key[0]), _series(members, labels), unnamed))
    return _numbered(panels)


def _order(value: Any) -> tuple[bool, Any]:
    """Sort numbers before texts. None is 0."""
    return isinstance(value, str), value or 0


def _numbered(panels: list[Panel]) -> list[Panel]:
    """Give panels whose names differ only by what a slug leaves out names of their own."""
    taken: set[str] = set()
    found = []
    for panel in panels:
        while panel.slug.lower() in taken:
            panel = replace(panel, number=panel.number + 1)
        taken.add(panel.slug.lower())
        found.append(panel)
    return found


def _labels(runs: Iterable[Run]) -> dict[str, _Labels]:
    """Return what names the runs of each method."""
    alike: dict[str, list[Run]] = {}
    for run in sorted(runs, key=_place):
        alike.setdefault(run.method, []).append(run)
    return {method: _Labels(members) for method, members in alike.items()}


def _series(runs: Iterable[Run], labels: Mapping[str, _Labels]) -> list[Series]:
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=_place):
        found.setdefault(labels[run.method].of(run), []).append(run)
    return [Series(label, members) for label, members in found.items()]


def _place(run: Run) -> tuple[int, str, int, int]:
    """Return what runs are sorted by: method, most reflections first, seed."""
    rank = len(ORDER)
    if run.method in ORDER:
        rank = ORDER.index(run.method)
    reflections = run.config.get("reflections") or 1 << 30
    return rank, run.method, -reflections, run.seed


class _Labels:
    """Name the runs of one method in a panel by the settings in which they differ.

    Args:
        runs: all runs of the method in the panel.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.method = runs[0].method
        self.keys = _differing(runs)
        variants = {tuple(self._values(run).values()): run for run in runs}
        columns = zip(*variants, strict=True)
        self.usual = {
            key: _usual(key, values) for key, values in zip(self.keys, columns, strict=True)
        }
        texts = Counter(self._text(run, _setting) for run in variants.values())
        self.ambiguous = {text for text, count in texts.items() if count > 1}

    def of(self, run: Run) -> str:
        """Return the method of a run, and those of its settings that are not usual."""
        text = self._text(run, _setting)
        if text in self.ambiguous:
            return self._text(run, _exact_setting)
        return text

    @property
    def unnamed(self) -> str:
        """Return the usual settings, which labels leave out, as a sentence. It may be empty."""
        texts = []
        for key, value in self.usual.items():
            if value is _AS_LR:
                texts.append(f"{key} = lr")
            elif value is not _UNUSED:
                texts.append(_setting(key, value))
        if not texts:
            return ""
        return f"{self.method}, unless named: {', '.join(texts)}"

    def _text(self, run: Run, write: Callable[[str, object], str]) -> str:
        named = [
            write(key, _value(run, key))
            for key, value in self._values(run).items()
            if value not in (_UNUSED, self.usual[key])
        ]
        if not named:
            return run.method
        return f"{run.method} ({', '.join(named)})"

    def _values(self, run: Run) -> dict[str, object]:
        """Return the settings in which the runs differ."""
        values = {key: _value(run, key) for key in self.keys}
        if "lr" in values and values.get("orthogonal_lr") == values["lr"]:
            values["orthogonal_lr"] = _AS_LR
        return values


def _differing(runs: Sequence[Run]) -> list[str]:
    """Return the settings by which some of the runs differ, learning rates last."""
    keys = dict.fromkeys(key for run in runs for key in (*run.config, DATA))
    found = []
    for key in keys:
        values = {_value(run, key) for run in runs} - {_UNUSED}
        if key not in INCIDENTAL and len(values) > 1:
            found.append(key)
    return sorted(found, key=lambda key: key.endswith("lr"))


def _value(run: Run, key: str) -> object:
    """Return a setting, or _UNUSED if it belongs to a part that the run does not have."""
    if key == DATA:
        return _data(run)
    part = describe(run.task).parts.get(key)
    if part is not None and not run.setting(part):
        return _UNUSED
    return run.setting(key)


def _data(run: Run) -> object:
    """Return the hash of what a run learned from, or _UNUSED if its record has none."""
    about = (run.record or {}).get("data")
    if isinstance(about, dict) and isinstance(about.get("sha256"), str):
        return about["sha256"][:SHOWN_HASH]
    return _UNUSED


def _usual(key: str, values: Sequence[object]) -> object:
    """Return the value that a label leaves out, given those of all variants."""
    used = [value for value in values if value is not _UNUSED]
    value, count = Counter(used).most_common(1)[0]
    # Two of three are not enough: labels of few variants have every value.
    if key not in ALWAYS_NAMED and 3 * count > 2 * len(used):
        return value
    if _AS_LR in used:
        return _AS_LR
    return _UNUSED


def _setting(key: str, value: object) -> str:
    shown = shorten(as_given(value), LONGEST, placeholder="…")
    if key == "nonlinearity":
        return shown
    if isinstance(value, float):
        shown = number(value)
    if key == "reflections" and value is None:
        shown = "N"
    return f"{LETTERS.get(key, key)} = {shown}"


def _exact_setting(key: str, value: object) -> str:
    """Return a setting with all of its digits or letters."""
    if isinstance(value, float | str):
        return f"{LETTERS.get(key, key)} = {as_given(value)}"
    return _setting(key, value)
