"""Which of the CUDA ways serves which size: one function, and one table of constants.

There are three ways. The way "fused" takes one launch from vectors to Q and one for the gradient.
The way "blocked" uses torch's float32 products, and kernels for the rest. The way "split_fp16" runs
these products as fp16 ones with float32 accuracy.

:func:`choose` picks them by size. :func:`rows` returns the table, which README.md and ``cwy info``
show.
"""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._linalg import has_fast_double


@dataclass(frozen=True, slots=True)
class Constant:
    """Describe one constant: tuned on an H200, or a limit that follows from something else.

    Attributes:
        constant: its name in ``tiers.py``.
        value: its value.
        way: the way that it belongs to.
        decides: what it decides.
        record: the file that shows the measurement, empty for a limit.
        limit: what the value follows from, empty for a tuned one.
    """

    constant: str
    value: int
    way: str
    decides: str
    record: str = ""
    limit: str = ""


_TABLE: list[Constant] = []
_THIN = "results/bench/h200/thin.txt"
_SPLIT = "results/bench/h200/halves.txt"
_TUNING = "results/bench/h200/tuning.txt"


def _tuned(constant: str, value: int, way: str, decides: str, record: str) -> int:
    """Enter a tuned constant into the table and return its value."""
    _TABLE.append(Constant(constant, value, way, decides, record=record))
    return value


def _limited(constant: str, value: int, way: str, decides: str, limit: str) -> int:
    """Enter a limit into the table and return its value."""
    _TABLE.append(Constant(constant, value, way, decides, limit=limit))
    return value


def rows() -> list[dict[str, Any]]:
    """Return the table of constants, in the order of the decisions.

    Example:
        >>> rows()[0]["constant"], rows()[0]["value"]
        ('ONE_LAUNCH_SIDE', 512)
    """
    return [asdict(constant) for constant in _TABLE]


# The limits between the ways.
ONE_LAUNCH_SIDE = _tuned(
    "ONE_LAUNCH_SIDE", 512, "fused", "N and L up to this take one launch", _TUNING
)
THIN_COLUMNS = _tuned(
    "THIN_COLUMNS",
    256,
    "fused",
    "L up to this takes one launch for U and T, for T-CWY, and for a small Q",
    _THIN,
)
THIN_ENTRIES = _tuned(
    "THIN_ENTRIES", 2**18, "fused", "the most entries of a thin v whose Q takes one launch", _THIN
)
THIN_Q_ENTRIES = _tuned(
    "THIN_Q_ENTRIES", 2**22, "fused", "the most entries of Q for a thin v in one launch", _THIN
)
SPLIT_ENTRIES = _tuned(
    "SPLIT_ENTRIES", 2**22, "split_fp16", "entries of v from which it serves, for L <= N", _SPLIT
)
SPLIT_THIN_ROWS = _tuned(
    "SPLIT_THIN_ROWS", 4096, "split_fp16", "N from which it forms Q of a thin v", _TUNING
)
SLOW_DOUBLE_WORK = _limited(
    "SLOW_DOUBLE_WORK",
    2**26,
    "all",
    "N L^2 above which a GPU with slow float64 leaves the call to the next backend",
    "estimated: 2^27 float64 operations take 0.3 ms at 0.5 TFLOP/s",
)

# How one launch is divided.
THREADS = _limited(
    "THREADS",
    256,
    "fused",
    "threads of a block",
    "eight warps of 16 x 32 entries cover a tile of TILE_MANY",
)
RESIDENT = _tuned("RESIDENT", 2, "fused", "blocks that a multiprocessor holds at least", _TUNING)
TILE = _limited(
    "TILE",
    32,
    "fused",
    "rows and columns of a tile of a product",
    "a warp loads a row of it, one number per lane",
)
TILE_MANY = _limited(
    "TILE_MANY",
    64,
    "fused",
    "the same in large batches",
    "a warp loads a row of it, two numbers per lane",
)
COLUMNS = _tuned("COLUMNS", 8, "fused", "columns that a block sums at once", _TUNING)
COLUMNS_MANY = _tuned("COLUMNS_MANY", 32, "fused", "the same in large batches", _TUNING)
SLAB = _limited(
    "SLAB",
    64,
    "fused",
    "terms of a product that shared memory holds",
    "eight warps load eight terms each",
)
SLAB_MANY = _limited(
    "SLAB_MANY",
    32,
    "fused",
    "the same in large batches",
    "sixteen lanes load a pair of terms each, as tensor cores take them",
)
AHEAD = _tuned("AHEAD", 4, "fused", "loads of the Gram matrix that are under way at once", _TUNING)
WARP_TILES = _limited(
    "WARP_TILES",
    8,
    "fused",
    "the most tiles of a panel that a warp holds",
    "eight warps of so many tiles, 8 wide, hold ONE_LAUNCH_SIDE columns",
)
WATCHED_BLOCKS = _tuned(
    "WATCHED_BLOCKS", 128, "fused", "the most blocks that watch each other's flags", _TUNING
)
CLUSTER_BLOCKS = _tuned(
    "CLUSTER_BLOCKS",
    16,
    "fused",
    "the most blocks of a cluster on Hopper and large Blackwell GPUs",
    "results/bench/h200/batch-share.txt",
)
SMALL_CLUSTER_BLOCKS = _limited(
    "SMALL_CLUSTER_BLOCKS",
    8,
    "fused",
    "the same on small Blackwell GPUs",
    "the largest cluster that all GPUs with clusters allow",
)
CLUSTER_SIDE = _tuned(
    "CLUSTER_SIDE",
    128,
    "fused",
    "N and L up to this take no more blocks than one cluster",
    "results/bench/h200/batch-share.txt",
)
LONG_ROWS = _tuned("LONG_ROWS", 512, "fused", "sums over more rows are cut into parts", _TUNING)
PART_ROWS = _tuned("PART_ROWS", 128, "fused", "the fewest rows of a part", _TUNING)
PRODUCT_PART_ROWS = _tuned(
    "PRODUCT_PART_ROWS",
    256,
    "fused",
    "the fewest rows of a part of a product, for L >= 64",
    _TUNING,
)

# How large matrices are cut.
INVERTED_BLOCK = _tuned(
    "INVERTED_BLOCK", 512, "blocked", "the side of blocks of S that one launch inverts", _TUNING
)
GRAM_STRIP = _tuned(
    "GRAM_STRIP", 1024, "blocked", "rows of the float64 Gram matrix computed at once", _TUNING
)
CUT_INVERSE = _tuned(
    "CUT_INVERSE", 2048, "blocked", "the side from which products skip the zeros of T", _TUNING
)
COLUMN_THREADS = _tuned(
    "COLUMN_THREADS", 1024, "blocked", "threads of a block that sums columns", _TUNING
)
COLUMN_WIDTH = _tuned("COLUMN_WIDTH", 16, "blocked", "columns of such a block", _TUNING)
SPLIT_TERMS = _tuned(
    "SPLIT_TERMS",
    512,
    "split_fp16",
    "the fewest terms that tensor cores add up at once",
    _TUNING,
)
SPLIT_PIECES = _tuned(
    "SPLIT_PIECES", 12, "split_fp16", "the most pieces into which a long sum is cut", _TUNING
)
SPLIT_TILE = _tuned(
    "SPLIT_TILE", 64, "split_fp16", "rows and columns of a block that splits numbers", _TUNING
)
SPLIT_TILE_ROWS = _tuned("SPLIT_TILE_ROWS", 16, "split_fp16", "rows of it at once", _TUNING)


class Way(enum.Enum):
    """Name one way to compute on a GPU, after its file."""

    FUSED = "fused"
    BLOCKED = "blocked"
    SPLIT_FP16 = "split_fp16"


class Tier(NamedTuple):
    """Hold the ways that serve one size.

    Attributes:
        factors: for U and T, and for the T-CWY matrix and its gradient.
        matrix: for Q.
        gradient: for the gradient of Q.
    """

    factors: Way
    matrix: Way
    gradient: Way


SMALL = Tier(Way.FUSED, Way.FUSED, Way.FUSED)
THIN = Tier(Way.FUSED, Way.BLOCKED, Way.BLOCKED)
THIN_LONG = Tier(Way.FUSED, Way.SPLIT_FP16, Way.BLOCKED)
LARGE = Tier(Way.BLOCKED, Way.BLOCKED, Way.BLOCKED)
LARGEST = Tier(Way.BLOCKED, Way.SPLIT_FP16, Way.SPLIT_FP16)


def choose(v: Tensor) -> Tier:
    """Return the ways that serve ``v (*, N, L)``."""
    n, size = v.shape[-2:]
    if max(n, size) <= ONE_LAUNCH_SIDE:
        return SMALL
    entries = v.numel()
    if size > THIN_COLUMNS:
        if entries >= SPLIT_ENTRIES and size <= n and can_split(v):
            return LARGEST
        return LARGE
    if entries <= THIN_ENTRIES and entries // size * n <= THIN_Q_ENTRIES:
        return SMALL
    if n >= SPLIT_THIN_ROWS and can_split(v):
        return THIN_LONG
    return THIN


def can_split(v: Tensor) -> bool:
    """Return whether tensor cores take these sizes and add up fp16 products in float32.

    The Gram matrix stays in float64, which must be fast.
    """
    n, size = v.shape[-2:]
    if v.dim() != 2 or n % 8 != 0 or size % 8 != 0:
        return False
    if torch.backends.cuda.matmul.allow_fp16_accumulation:
        return False
    return has_fast_double(v.get_device())


def is_slow(v: Tensor) -> bool:
    """Return whether ``v (*, N, L)`` needs much float64 work from a GPU that is slow at it."""
    if v.numel() * v.shape[-1] <= SLOW_DOUBLE_WORK:
        return False
    return not has_fast_double(v.get_device())
