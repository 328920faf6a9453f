"""Group sentences of similar length, so that few shapes of batches recur."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .corpus import Pair
from .text import END, PAD, Vocabularies


@dataclass(frozen=True, slots=True)
class Bucket:
    """Hold pairs padded to one length.

    Attributes:
        source, target: ``(pairs + 1, length)``. The last row, without a target, fills batches up.
    """

    source: Tensor
    target: Tensor

    def __len__(self) -> int:
        return len(self.source) - 1

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield sources and targets of every pair, without the row that fills up."""
        sources = self.source[:-1].split(size)
        targets = self.target[:-1].split(size)
        return zip(sources, targets, strict=True)


class PlannedBatch(NamedTuple):
    """Hold the index of a bucket, and which of its rows make the batch."""

    bucket: int
    rows: Tensor


def make_buckets(
    pairs: Sequence[Pair],
    vocabularies: Vocabularies,
    *,
    width: int,
    at_least: int,
    device: torch.device,
) -> list[Bucket]:
    """Group pairs by the length of their longer sentence, rounded up to a multiple of ``width``.

    A bucket of fewer pairs than ``at_least`` is merged with the next longer one, and what is left
    at the end with the last.
    """
    by_length: dict[int, list[Pair]] = defaultdict(list)
    for pair in pairs:
        longer = max(len(pair.source), len(pair.target))
        by_length[math.ceil((longer + 1) / width) * width].append(pair)
    lengths = sorted(by_length)
    buckets = []
    waiting: list[Pair] = []
    for length in lengths:
        waiting += by_length[length]
        remaining = sum(len(by_length[other]) for other in lengths if other > length)
        enough = len(waiting) >= at_least and remaining >= at_least
        if enough or length == lengths[-1]:
            buckets.append(_bucket(waiting, vocabularies, length, device))
            waiting = []
    return buckets


def _bucket(
    pairs: Sequence[Pair], vocabularies: Vocabularies, length: int, device: torch.device
) -> Bucket:
    sources = [vocabularies.source.numbers(pair.source) for pair in pairs]
    targets = [vocabularies.target.numbers(pair.target) for pair in pairs]
    return Bucket(
        source=padded([*sources, [END]], length).to(device),
        target=padded([*targets, []], length).to(device),
    )


def plan(buckets: Sequence[Bucket], size: int, generator: torch.Generator) -> list[PlannedBatch]:
    """Draw the batches of an epoch in random order.

    All batches have the same size, except that of a bucket with fewer pairs.
    """
    batches = []
    for number, bucket in enumerate(buckets):
        rows = torch.randperm(len(bucket), generator=generator)
        filling = rows.new_full((-len(rows) % min(size, len(rows)),), len(bucket))
        filled = torch.cat([rows, filling]).to(bucket.source.device)
        batches += [PlannedBatch(number, part) for part in filled.split(size)]
    order = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[i] for i in order]


def count_batches(buckets: Sequence[Bucket], size: int) -> int:
    """Return the number of batches per epoch."""
    return sum(math.ceil(len(bucket) / size) for bucket in buckets)


def padded(rows: Sequence[list[int]], length: int | None = None) -> Tensor:
    """Return rows of numbers as a tensor, padded to a length, by default that of the longest."""
    if length is None:
        length = max(map(len, rows))
    return torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
