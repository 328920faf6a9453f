"""Pairs of sentences from a tab-separated file, cleaned, split and counted."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data import DataError, tatoeba
from .recipes import NmtConfig
from .text import Vocabulary, Words, words

TEST = 0.2

Pair = tuple[Words, Words]


@dataclass(frozen=True)
class Corpus:
    """Training pairs and held-out ones, (source, target), none in both, with the vocabularies of the training pairs.

    Attributes:
        facts: what the record says of the data.
    """

    train: list[Pair]
    held_out: list[Pair]
    source: Vocabulary
    target: Vocabulary
    facts: dict[str, Any]

    @property
    def identity(self) -> dict[str, Any]:
        """What weights remember of their data: the words, the longest source in training, the file's hash."""
        longest = max(len(source) for source, _ in self.train)
        return {
            "source": self.source.words,
            "target": self.target.words,
            "longest": longest,
            "sha256": self.facts["sha256"],
        }

    @property
    def longest(self) -> tuple[int, int]:
        """Words of the longest source and target, their ends counted."""
        lengths = [(len(source), len(target)) for source, target in (*self.train, *self.held_out)]
        return max(source for source, _ in lengths) + 1, max(target for _, target in lengths) + 1


def load(config: NmtConfig, seed: int) -> Corpus:
    """The corpus of a run; the seed draws the split."""
    content, name = (
        (tatoeba.load(), "Tatoeba")
        if config.file is None
        else (_bytes(Path(config.file)), config.file)
    )
    found, bad = read(content, name, config.columns)
    distinct = list(dict.fromkeys(found))
    random.Random(seed).shuffle(distinct)  # noqa: S311
    chosen = distinct[: config.pairs]
    count = round(TEST * len(chosen))
    test, train = chosen[:count], chosen[count:]
    part = "test"
    if config.validation is not None:
        count = round(config.validation * len(train))
        part, test, train = "validation", train[:count], train[count:]
    if not test or not train:
        raise DataError(
            f"{name} has too few different pairs, {len(chosen)}, to train on some and to hold out others."
        )
    source, target = (
        Vocabulary.of((pair[side] for pair in train), config.min_count) for side in (0, 1)
    )
    facts = {
        "file": name,
        "sha256": hashlib.sha256(content).hexdigest(),
        "pairs": len(found),
        "bad lines": bad,
        "repeated pairs": len(found) - len(distinct),
        "train": len(train),
        part: len(test),
        "vocabulary": [len(source), len(target)],
        "held-out words unknown": [
            _unknown(test, side, known) for side, known in enumerate((source, target))
        ],
        "held-out sentences seen in training": [_seen(test, train, side) for side in (0, 1)],
        "mean words": [
            round(sum(len(pair[side]) for pair in chosen) / len(chosen), 2) for side in (0, 1)
        ],
    }
    return Corpus(train, test, source, target, facts)


def read(content: bytes, name: str, columns: str) -> tuple[list[Pair], int]:
    """The pairs of a tab-separated text, and the number of lines that are none."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} is not UTF-8: byte {content[error.start]:#04x} at {error.start}. Convert it first."
        ) from None
    if "\0" in text:
        raise DataError(f"{name} is no text in UTF-8: it has zero bytes. Convert it first.")
    pairs, bad = [], 0
    for line in text.split("\n"):
        # What follows the second column, such as an attribution, is left out.
        first, second, *_ = (*map(words, line.split("\t", 2)[:2]), (), ())
        if first and second:
            pairs.append((first, second) if columns == "1-2" else (second, first))
        elif line.strip():
            bad += 1
    if not pairs:
        why = f"its {bad} lines are something else" if bad else "it is empty"
        raise DataError(f"{name} holds no pair of sentences with a tab between: {why}.")
    return pairs, bad


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the file {path}: {error.strerror}.") from error


def _unknown(pairs: list[Pair], side: int, known: Vocabulary) -> float:
    every = [word for pair in pairs for word in pair[side]]
    return round(sum(word not in known for word in every) / len(every), 4)


def _seen(pairs: list[Pair], train: list[Pair], side: int) -> float:
    seen = {pair[side] for pair in train}
    return round(sum(pair[side] in seen for pair in pairs) / len(pairs), 4)
