"""Read pairs of sentences from a tab-separated file, split them, and count words."""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ..data import DataError, tatoeba
from .recipes import NmtConfig
from .text import SPECIAL, Vocabularies, Vocabulary, Words, words

TEST = 0.2
"""The fraction of the pairs that is held out for the test."""


class Pair(NamedTuple):
    """Hold a sentence and its translation."""

    source: Words
    target: Words


class Content(NamedTuple):
    """Hold the pairs of a file, and the number of its other lines."""

    pairs: list[Pair]
    bad_lines: int


class _Split(NamedTuple):
    train: list[Pair]
    held_out: list[Pair]
    test: list[Pair]


@dataclass(frozen=True)
class Corpus:
    """Hold training pairs and held-out pairs, none in both, and the words of the training pairs.

    Attributes:
        train: the pairs to train on.
        held_out: the pairs on which epochs are compared.
        test: the pairs that are not trained on in any case. They are the held-out pairs unless
            there are validation pairs.
        vocabularies: the words of the training pairs.
        facts: the record's entries about the data.
    """

    train: list[Pair]
    held_out: list[Pair]
    test: list[Pair]
    vocabularies: Vocabularies
    facts: dict[str, Any]

    @property
    def identity(self) -> dict[str, Any]:
        """Return what weights keep of their data.

        These are the words, the length of the longest source in training, and the file's hash.
        """
        return {
            "source": self.vocabularies.source.words,
            "target": self.vocabularies.target.words,
            "longest": max(len(pair.source) for pair in self.train),
            "sha256": self.facts["sha256"],
        }

    @property
    def longest_target(self) -> int:
        """Return the number of words of the longest target, with its end."""
        pairs = [*self.train, *self.held_out, *self.test]
        return 1 + max(len(pair.target) for pair in pairs)


def load(config: NmtConfig, seed: int) -> Corpus:
    """Load the corpus of a run. The seed draws the split."""
    if config.file is None:
        name = "Tatoeba"
        content = tatoeba.load()
    else:
        name = config.file
        content = _bytes(Path(config.file))
    wanted = _Wanted(config.columns, config.pairs, config.validation, config.min_count, seed)
    return _corpus(content, name, wanted)


class _Wanted(NamedTuple):
    """Hold the settings that the corpus of a run depends on."""

    columns: str
    pairs: int | None
    validation: float | None
    min_count: int
    seed: int


@lru_cache(maxsize=1)
def _corpus(content: bytes, name: str, wanted: _Wanted) -> Corpus:
    """Make a corpus. The last one is remembered, for runs that follow each other in a process."""
    found = read(content, name, wanted.columns)
    distinct = list(dict.fromkeys(found.pairs))
    random.Random(wanted.seed).shuffle(distinct)  # noqa: S311
    chosen = distinct[: wanted.pairs]
    split = _split(chosen, wanted.validation)
    if not split.held_out or not split.train or not split.test:
        part = ""
        if wanted.validation is not None:
            part = f" with validation={wanted.validation:g}"
        raise DataError(
            f"{name} has too few different pairs, {len(chosen)}, "
            f"to train on some and to hold out others{part}."
        )
    vocabularies = Vocabularies(
        source=Vocabulary.of(_sources(split.train), wanted.min_count),
        target=Vocabulary.of(_targets(split.train), wanted.min_count),
    )
    if min(map(len, vocabularies)) == len(SPECIAL):
        raise DataError(
            f"{name}: no word occurs min_count={wanted.min_count} times in its {len(split.train)} "
            "training pairs. Lower min_count."
        )
    counts = {"train": len(split.train)}
    if wanted.validation is not None:
        counts["validation"] = len(split.held_out)
    counts["test"] = len(split.test)
    facts = {
        "file": name,
        "sha256": hashlib.sha256(content).hexdigest(),
        "pairs": len(found.pairs),
        "bad lines": found.bad_lines,
        "repeated pairs": len(found.pairs) - len(distinct),
        **counts,
        **_word_facts(chosen, split, vocabularies),
    }
    return Corpus(split.train, split.held_out, split.test, vocabularies, facts)


def _split(pairs: list[Pair], validation: float | None) -> _Split:
    """Hold out the test pairs, or, of the other pairs, a fraction for validation."""
    count = round(TEST * len(pairs))
    test, train = pairs[:count], pairs[count:]
    if validation is None:
        return _Split(train=train, held_out=test, test=test)
    count = round(validation * len(train))
    return _Split(train=train[count:], held_out=train[:count], test=test)


def _word_facts(
    chosen: Sequence[Pair], split: _Split, vocabularies: Vocabularies
) -> dict[str, list[Any]]:
    """Return counts of words and sentences, each for the source and the target."""
    sources = _sources(split.held_out)
    targets = _targets(split.held_out)
    return {
        "vocabulary": [len(vocabularies.source), len(vocabularies.target)],
        "held-out words unknown": [
            _unknown(sources, vocabularies.source),
            _unknown(targets, vocabularies.target),
        ],
        "held-out sentences seen in training": [
            _seen(sources, _sources(split.train)),
            _seen(targets, _targets(split.train)),
        ],
        "mean words": [_mean_length(_sources(chosen)), _mean_length(_targets(chosen))],
        "most words": [max(map(len, _sources(chosen))), max(map(len, _targets(chosen)))],
        "loss by word frequency": [
            frequency_loss(vocabularies.source, _sources(split.train), sources),
            frequency_loss(vocabularies.target, _targets(split.train), targets),
        ],
    }


def frequency_loss(
    vocabulary: Vocabulary, train: Sequence[Words], held_out: Sequence[Words]
) -> float:
    """Return the loss, in nats per word, of a guess by how often each word is in training.

    A network has learned something only below it. Each word counts as if it occurred once more.
    """
    counts = Counter(range(len(vocabulary)))
    for sentence in train:
        counts.update(vocabulary.numbers(sentence))
    guessed = [counts[number] for sentence in held_out for number in vocabulary.numbers(sentence)]
    loss = math.log(counts.total()) - sum(map(math.log, guessed)) / len(guessed)
    return round(loss, 3)


def read(content: bytes, name: str, columns: str) -> Content:
    """Read the pairs of a tab-separated text, and count the lines that are no pair."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = f"byte {content[error.start]:#04x} at {error.start}"
        raise DataError(f"{name} is not UTF-8: {byte}. Convert it first.") from None
    if "\0" in text:
        raise DataError(f"{name} is no text in UTF-8: it has zero bytes. Convert it first.")
    pairs = []
    bad_lines = 0
    for line in text.split("\n"):
        pair = _pair(line, columns)
        if pair is not None:
            pairs.append(pair)
        elif line.strip():
            bad_lines += 1
    if not pairs:
        reason = "it is empty"
        if bad_lines:
            reason = f"its {bad_lines} lines are something else"
        raise DataError(f"{name} holds no pair of sentences with a tab between: {reason}.")
    return Content(pairs, bad_lines)


def _pair(line: str, columns: str) -> Pair | None:
    """Read the first two columns of a line. More columns, such as an attribution, are ignored."""
    texts = line.split("\t", 2)
    if len(texts) < 2:
        return None
    first = words(texts[0])
    second = words(texts[1])
    if not first or not second:
        return None
    if columns == "1-2":
        return Pair(source=first, target=second)
    return Pair(source=second, target=first)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read the file {path}: {error.strerror}.") from error


def _sources(pairs: Sequence[Pair]) -> list[Words]:
    return [pair.source for pair in pairs]


def _targets(pairs: Sequence[Pair]) -> list[Words]:
    return [pair.target for pair in pairs]


def _unknown(sentences: Sequence[Words], known: Vocabulary) -> float:
    """Return the fraction of words that are not in a vocabulary."""
    every = [word for sentence in sentences for word in sentence]
    return round(sum(word not in known for word in every) / len(every), 4)


def _seen(sentences: Sequence[Words], train: Sequence[Words]) -> float:
    """Return the fraction of sentences that occur in training."""
    seen = set(train)
    return round(sum(sentence in seen for sentence in sentences) / len(sentences), 4)


def _mean_length(sentences: Sequence[Words]) -> float:
    return round(sum(len(sentence) for sentence in sentences) / len(sentences), 2)
