"""The gradient of the transition: a sum over all rows of two tall matrices.

On Hopper GPUs it runs on tensor cores, with the accuracy of float32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _nvrtc
from .._precision import full_precision
from .tiling import KERNELS

FEW_ROWS = 256
"""Below this a plain product is as exact."""
CHUNK_ROWS = 1024
"""A plain product is divided into so many rows, because one long float32 sum loses digits."""
STEP_ROWS = 32
"""Rows of a step of the kernel."""
STAGES = 3
"""Steps of the kernel that shared memory holds."""


def product(a: Tensor, b: Tensor, heads: Tensor) -> Tensor:
    r"""Compute $\sum_k a_k b_k^\top$, where the first rows of b are those of ``heads``.

    Args:
        a: ``(K, M)``, float32, on a GPU.
        b: ``(at least K - H, N)``, the rows after those of ``heads``.
        heads: ``(H, N)``.

    Returns:
        ``(M, N)``.
    """
    rows, m = a.shape
    headed, n = heads.shape
    if rows < FEW_ROWS:
        return _plain(a, b, heads)
    tiling = _tiling(m, n, a.get_device())
    if tiling is None:
        return _plain(a, b, heads)
    # The kernel begins up to 7 rows early, so that the heads end where 8 rows do.
    padded = rows + 7
    each = -(-padded // (tiling.parts * STEP_ROWS)) * STEP_ROWS
    parts = -(-padded // each)
    out = a.new_empty(parts, m, n)
    given = (a.contiguous(), b.contiguous(), heads.contiguous())
    sizes = (m, n, rows, headed, each)
    tiling.kernel((tiling.tiles, parts), tiling.threads, *given, out, *sizes)
    return out.sum(0)


def _plain(a: Tensor, b: Tensor, heads: Tensor) -> Tensor:
    """Compute the same by products of few rows, so that no sum is long."""
    rows = a.shape[0]
    headed = heads.shape[0]
    total = a.new_zeros(a.shape[1], heads.shape[1])
    with full_precision("cuda"):
        for left, right in ((a[:headed], heads), (a[headed:], b[: rows - headed])):
            chunks = zip(left.split(CHUNK_ROWS), right.split(CHUNK_ROWS), strict=True)
            for ours, theirs in chunks:
                total = total + ours.mT @ theirs
    return total


@dataclass(frozen=True)
class _Tiling:
    """Describe how the kernel divides the result and the rows.

    Attributes:
        kernel: compiled for this tiling.
        threads: threads of a block.
        tiles: tiles of the result.
        parts: the most parts into which the rows are divided.
    """

    kernel: _nvrtc.Kernel
    threads: int
    tiles: int
    parts: int


@functools.cache
def _tiling(m: int, n: int, device: int) -> _Tiling | None:
    """Return the tiling for an M x N result, or None where the GPU has no such kernel."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        return None
    macros = _macros(m, n)
    width = macros["WIDTH"]
    groups = macros["WARPGROUPS"]
    tiles = -(-m // (64 * groups)) * -(-n // width)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    # Each number of b is a high and a low part.
    shared = STAGES * 2 * width * STEP_ROWS * 4
    with torch.cuda.device(device):
        kernel = _nvrtc.kernel(KERNELS / "product.cu", "product", macros, shared)
    at_once = processors * macros["BLOCKS_PER_PROCESSOR"]
    return _Tiling(kernel, 128 * groups, tiles, max(1, at_once // tiles))


def _macros(m: int, n: int) -> dict[str, int]:
    """Return the macros of tiles that fit M x N with little to spare."""
    groups = 2
    if m <= 64:
        groups = 1
    elif 128 < m <= 192:
        groups = 3
    width = 128
    if n <= 64:
        width = 64
    elif groups == 3 or n <= 96 or 128 < n <= 192:
        width = 96
    blocks = 1
    if groups == 1:
        blocks = 2
    return {
        "WARPGROUPS": groups,
        "WIDTH": width,
        "BLOCKS_PER_PROCESSOR": blocks,
        "LOAD_WIDTH": 2 - m % 2,
        "STEP_ROWS": STEP_ROWS,
        "STAGES": STAGES,
    }
