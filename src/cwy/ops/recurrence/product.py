"""The transition's gradient: the sum over all rows of two tall matrices, at tensor-core speed with float32 accuracy."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .. import nvrtc
from ..precision import full_precision
from .shapes import KERNELS

FEW, CHUNK = 256, 1024  # rows of which a plain product is as exact, and to which it is cut: one long float32 sum loses digits


def product(a: Tensor, b: Tensor, heads: Tensor) -> Tensor:
    r"""$\sum_k a_k b_k^\top$, where row k of b is that of ``heads`` for the first of them, and the later rows are b's.

    Args:
        a: ``(K, M)``, float32, on a GPU.
        b: ``(at least K - H, N)``.
        heads: ``(H, N)``.

    Returns:
        ``(M, N)``.
    """
    rows, m, n, headed = a.shape[0], a.shape[1], heads.shape[1], heads.shape[0]
    if rows < FEW or (cut := _cut(m, n, a.get_device())) is None:
        with full_precision("cuda"):
            parts = (a[:headed], heads), (a[headed:], b[: rows - headed])
            pairs = (pair for part in parts for pair in zip(*(t.split(CHUNK) for t in part), strict=True))
            return sum((ours.mT @ theirs for ours, theirs in pairs), a.new_zeros(m, n))
    each = -(-(rows + 7) // (cut.parts * 32)) * 32
    parts = -(-(rows + 7) // each)
    out, given = a.new_empty(parts, m, n), (a.contiguous(), b.contiguous(), heads.contiguous())
    cut.kernel((cut.tiles, parts), cut.threads, *given, out, m, n, rows, headed, each)
    return out.sum(0)


class _Cut(NamedTuple):
    """The kernel, and into how many ``tiles`` it cuts the result and, at most, ``parts`` the rows."""

    kernel: nvrtc.Kernel
    threads: int
    tiles: int
    parts: int


@functools.cache
def _cut(m: int, n: int, device: int) -> _Cut | None:
    """For a result M x N; None where the GPU has no such kernel."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        return None
    macros = _macros(m, n)
    groups, width, blocks = macros["GROUPS"], macros["WIDTH"], macros["BLOCKS"]
    tiles = -(-m // (64 * groups)) * -(-n // width)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    with torch.cuda.device(device):
        kernel = nvrtc.kernel(KERNELS / "product.cu", "product", macros, 3 * 2 * width * 128)
    return _Cut(kernel, 128 * groups, tiles, max(1, processors * blocks // tiles))


def _macros(m: int, n: int) -> dict[str, int]:
    """Tiles of 64 GROUPS x WIDTH that fit M x N with little to spare."""
    groups = 1 if m <= 64 else 3 if 128 < m <= 192 else 2
    width = 64 if n <= 64 else 96 if groups == 3 or n <= 96 or 128 < n <= 192 else 128
    return {"GROUPS": groups, "WIDTH": width, "PIECES": 1, "BLOCKS": 2 if groups == 1 else 1, "VEC": 2 - m % 2}
