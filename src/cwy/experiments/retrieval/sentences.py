"""Pairs of sentences as tokens: 1,000 each for validation and test, and none of them in training.

The split is the same for every seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..data import DataError, tatoeba
from . import tokens
from .tokens import Tokens

HELD_OUT = 1000
"""The pairs of validation, and those of the test."""
SPLIT_SEED = 0
PARTS = ("train", "validation", "test")


class Pair(NamedTuple):
    """Hold an English sentence and its Spanish translation."""

    english: str
    spanish: str


@dataclass(frozen=True)
class Split:
    """Hold pairs for training, validation and test. No sentence is in two of them."""

    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]


@dataclass(frozen=True)
class Sentences:
    """Hold the tokens of all parts, and the record's entries about them."""

    train: Tokens
    validation: Tokens
    test: Tokens
    facts: dict[str, Any]


def load(tokenizer: Path, length: int, pairs: int | None, device: torch.device) -> Sentences:
    """Load Tatoeba's pairs as tokens. They are tokenized once, and then kept in the cache folder.

    Args:
        tokenizer: the file ``tokenizer.json``.
        length: tokens of a sentence.
        pairs: of training. None is all.
        device: where the tokens go.
    """
    content = tatoeba.load()
    name = tokens.name_of(content, tokenizer.read_bytes(), length, pairs, HELD_OUT, SPLIT_SEED)
    found = tokens.kept(name)
    if found is None:
        found = _tokenized(divide(read(content), pairs), tokens.Tokenizer(tokenizer, length))
        tokens.keep(name, found)
    parts = {part: found.pairs(part, device) for part in PARTS}
    facts: dict[str, Any] = {part: len(parts[part].english) for part in PARTS}
    facts["sentences cut"] = found.cut
    return Sentences(**parts, facts=facts)


def _tokenized(split: Split, tokenize: tokens.Tokenizer) -> tokens.Kept:
    """Return the tokens of every part."""
    tensors = {}
    for part in PARTS:
        chosen: list[Pair] = getattr(split, part)
        tensors[f"{part} english"] = tokenize([pair.english for pair in chosen])
        tensors[f"{part} spanish"] = tokenize([pair.spanish for pair in chosen])
    return tokens.Kept(tensors, round(tokenize.cut / tokenize.seen, 4))


def read(content: bytes) -> list[Pair]:
    """Read lines of English, a tab, Spanish. Each pair appears once."""
    found = {}
    for line in content.decode("utf-8-sig").split("\n"):
        texts = line.split("\t", 2)
        if len(texts) >= 2 and texts[0].strip() and texts[1].strip():
            found[Pair(texts[0].strip(), texts[1].strip())] = None
    return list(found)


def divide(pairs: Sequence[Pair], count: int | None) -> Split:
    """Hold out pairs whose sentences occur once, and train on pairs without these sentences."""
    english = Counter(pair.english.lower() for pair in pairs)
    spanish = Counter(pair.spanish.lower() for pair in pairs)
    order = list(pairs)
    random.Random(SPLIT_SEED).shuffle(order)  # noqa: S311
    alone = []
    rest = []
    for pair in order:
        occurs_once = english[pair.english.lower()] == 1 and spanish[pair.spanish.lower()] == 1
        if occurs_once and len(alone) < 2 * HELD_OUT:
            alone.append(pair)
        else:
            rest.append(pair)
    if len(alone) < 2 * HELD_OUT or not rest:
        raise DataError(
            f"retrieval holds out {2 * HELD_OUT} pairs of sentences that occur once, and found "
            f"{len(alone)}."
        )
    return Split(rest[:count], alone[:HELD_OUT], alone[HELD_OUT:])
