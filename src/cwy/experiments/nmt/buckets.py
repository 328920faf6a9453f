"""Sentences of like length side by side: few shapes, each of which comes again and again."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from .corpus import Pair
from .text import END, PAD, Vocabulary


class Bucket(NamedTuple):
    """Pairs padded to one length, ``source`` and ``target (pairs + 1, length)``. The last row, without a target, fills up."""

    source: Tensor
    target: Tensor

    def __len__(self) -> int:
        return len(self.source) - 1


def buckets(
    pairs: list[Pair], source: Vocabulary, target: Vocabulary, width: int, at_least: int, device: torch.device
) -> list[Bucket]:  # fmt: skip
    """The pairs by the length of their longer sentence, rounded up to a multiple of ``width``.

    A bucket of fewer pairs than ``at_least`` goes into the next longer one, all the longest into the last.
    """
    by_length: dict[int, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_length[-(-(max(map(len, pair)) + 1) // width) * width].append(pair)
    made, left = [], []
    lengths = sorted(by_length)
    for length in lengths:
        left += by_length[length]
        longer = sum(len(by_length[other]) for other in lengths if other > length)
        if length == lengths[-1] or (len(left) >= at_least and longer >= at_least):
            rows = [(source.numbers(one), target.numbers(other)) for one, other in left]
            rows.append(([END], []))
            made.append(
                Bucket(*(padded([row[side] for row in rows], length).to(device) for side in (0, 1)))
            )
            left = []
    return made


def plan(made: list[Bucket], size: int, generator: torch.Generator) -> list[tuple[int, Tensor]]:
    """The batches of an epoch, in random order: the bucket of each, and which of its rows.

    All have the same size; where there are fewer pairs than that, the one batch has these.
    """
    batches = []
    for number, bucket in enumerate(made):
        rows = torch.randperm(len(bucket), generator=generator)
        filling = rows.new_full((-len(rows) % min(size, len(rows)),), len(bucket))
        batches += [
            (number, part)
            for part in torch.cat([rows, filling]).to(bucket.source.device).split(size)
        ]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def steps(made: list[Bucket], size: int) -> int:
    """Batches an epoch."""
    return sum(-(-len(bucket) // size) for bucket in made)


def padded(rows: list[list[int]], length: int | None = None) -> Tensor:
    """Rows of numbers, padded to a length, or to the longest."""
    length = max(map(len, rows)) if length is None else length
    return torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
