"""How a cooperative launch is divided: all of its blocks run at once and meet between phases."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _nvrtc
from . import tiers
from .composite import largest_reciprocal

KERNELS = Path(__file__).parent / "kernels"
SIDE = 8  # of the tiles of S, and columns of a panel, as the float64 tensor cores take them
WARPS = tiers.THREADS // 32
# In solve.cuh each warp holds two results of 8 bytes, and the inverses of its tiles.
SHARED_BYTES = 8 * WARPS * (2 * SIDE * SIDE + tiers.WARP_TILES * SIDE * SIDE)
# Every macro of the headers, apart from the tiles. RECIPROCAL is an exponent of two.
MACROS = {
    "THREADS": tiers.THREADS,
    "RESIDENT": tiers.RESIDENT,
    "WATCHED_BLOCKS": tiers.WATCHED_BLOCKS,
    "SIDE": SIDE,
    "WARP_TILES": tiers.WARP_TILES,
    "AHEAD": tiers.AHEAD,
    "RECIPROCAL": int(math.log2(largest_reciprocal(torch.float32))),
}

# Blocks wait for a number that no call wrote before, so that memory need not be cleared. A call
# uses up to 64 of them.
_tickets = itertools.count(int.from_bytes(os.urandom(7), "little") << 6, 64)


def next_ticket() -> int:
    """Return the first of 64 numbers that no call had before."""
    return next(_tickets)


class Tiles(NamedTuple):
    """Describe the tiles of one variant of the kernels.

    Attributes:
        many: whether it is the variant for large batches.
        side: rows and columns of a tile of a product.
        columns: columns that a block sums at once.
        slab: terms of a product that shared memory holds.
    """

    many: bool
    side: int
    columns: int
    slab: int

    @property
    def macros(self) -> dict[str, int]:
        """Return the macros of the headers that this sets."""
        return {
            "MANY": int(self.many),
            "TILE": self.side,
            "COLUMNS": self.columns,
            "SLAB": self.slab,
        }


FEW_TILES = Tiles(False, tiers.TILE, tiers.COLUMNS, tiers.SLAB)
MANY_TILES = Tiles(True, tiers.TILE_MANY, tiers.COLUMNS_MANY, tiers.SLAB_MANY)


@dataclass(frozen=True, eq=False)
class Source:
    """Describe one kernel.

    Attributes:
        file: the file in ``kernels``.
        name: the function.
        structure: its argument.
        macros: its own macros.
        batched: whether matrices are independent, so that groups of blocks share them out.
    """

    file: str
    name: str
    structure: type[_nvrtc.Structure]
    macros: dict[str, int] = field(default_factory=dict)
    batched: bool = True

    def kernel(self, tiles: Tiles, large_clusters: bool) -> _nvrtc.Kernel:
        """Compile it for the current GPU. Large clusters have more than eight blocks."""
        macros = MACROS | tiles.macros | self.macros
        path = KERNELS / self.file
        return _nvrtc.kernel(
            path, self.name, macros, SHARED_BYTES, large_clusters, (self.structure,)
        )


class Division(NamedTuple):
    """Describe how a call is divided.

    Attributes:
        launch: takes the argument of the kernel.
        blocks: blocks of the launch.
        chunks: parts of the rows in sums over columns.
        splits: parts of the rows in products.
        groups: groups of blocks, which share out the batch and wait only for their own.
        part_size: numbers of 8 bytes, of each matrix, that hold the parts of sums.
    """

    launch: Callable[[_nvrtc.Structure], None]
    blocks: int
    chunks: int
    splits: int
    groups: int
    part_size: int


@functools.lru_cache(maxsize=1024)
def divide(source: Source, count: int, n: int, size: int, device: int) -> Division:
    """Return the division for ``count`` matrices ``n`` x ``size``."""
    cluster = _largest_cluster(device)
    large_clusters = cluster == tiers.CLUSTER_BLOCKS
    tiles = FEW_TILES
    with torch.cuda.device(device):
        kernel = source.kernel(tiles, large_clusters)
        if source.batched and _fills(count, n, size, kernel.blocks(tiers.THREADS)):
            tiles = MANY_TILES
            kernel = source.kernel(tiles, large_clusters)
        fit = kernel.blocks(tiers.THREADS)
    groups = 1
    if source.batched:
        groups = min(count, fit)
    room = fit // groups
    own = -(-count // groups)
    across = -(-size // tiles.side)
    columns = own * -(-size // tiles.columns)
    grams = own * across * (across + 1) // 2
    chunks = 1
    splits = 1
    if n > tiers.LONG_ROWS:
        chunks = max(1, min(room // columns, n // tiers.PART_ROWS))
        part_rows = max(tiers.PART_ROWS, min(4 * size, tiers.PRODUCT_PART_ROWS))
        splits = max(1, min(room // grams, n // part_rows))
    panels = own * (-(-n // SIDE) + -(-size // SIDE))
    products = own * _tile_count(n, size, tiles.side)
    each = min(room, max(products, panels, columns * chunks, grams * splits))
    if source.batched and large_clusters and max(n, size) <= tiers.CLUSTER_SIDE:
        each = min(each, cluster)
    if 1 < each <= cluster and kernel.clusters(tiers.THREADS, each) >= groups:
        launch = kernel.prepare((groups * each, 1), tiers.THREADS, cluster=each)
    else:
        launch = kernel.prepare((groups * each, 1), tiers.THREADS, cooperative=True)
    part_size = size * chunks
    if splits > 1:
        part_size = max(part_size, splits * padded(size) ** 2)
    return Division(launch, groups * each, chunks, splits, groups, part_size)


def _largest_cluster(device: int) -> int:
    """Return the most blocks of a cluster, or 0 where there are no clusters.

    The barrier of a cluster is faster than flags.
    """
    major, _ = torch.cuda.get_device_capability(device)
    if major in (9, 10):
        return tiers.CLUSTER_BLOCKS
    if major > 10:
        return tiers.SMALL_CLUSTER_BLOCKS
    return 0


def _tile_count(n: int, size: int, side: int) -> int:
    return -(-n // side) * -(-size // side)


def _fills(count: int, n: int, size: int, fit: int) -> bool:
    """Return whether large tiles keep all of the blocks that ``fit`` busy."""
    if min(n, size) <= FEW_TILES.side or n > tiers.LONG_ROWS:
        return False
    groups = min(count, fit)
    own = -(-count // groups)
    return own * _tile_count(n, size, MANY_TILES.side) >= fit // groups


def padded(size: int) -> int:
    """Return the side of S in whole tiles."""
    return -(-size // SIDE) * SIDE


class Workspace(NamedTuple):
    """Hold the memory of one call, by its addresses.

    Attributes:
        memory: the tensor that holds it.
        numbers: where the numbers of 8 bytes begin.
        flags: where the flags begin.
        floats: where the numbers of 4 bytes begin.
    """

    memory: Tensor
    numbers: int
    flags: int
    floats: int


def workspace_words(blocks: int, numbers: int, floats: int = 0) -> int:
    """Return how many numbers of 8 bytes a workspace has."""
    return numbers + blocks + (floats + 1) // 2


def workspace(like: Tensor, blocks: int, numbers: int, floats: int = 0) -> Workspace:
    """Allocate numbers of 8 bytes, a flag for each block, and numbers of 4 bytes."""
    words = workspace_words(blocks, numbers, floats)
    memory = torch.empty(words, dtype=torch.float64, device=like.device)
    begin = memory.data_ptr()
    flags = begin + 8 * numbers
    return Workspace(memory, begin, flags, flags + 8 * blocks)


def address(x: Tensor | None) -> int | None:
    """Return the address of a tensor, or None, which is the null pointer."""
    if x is None:
        return None
    return x.data_ptr()
