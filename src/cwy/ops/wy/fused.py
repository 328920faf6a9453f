"""The kernels that go from vectors to a matrix, and from its gradient to theirs, in one launch each."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .. import nvrtc

KERNELS = Path(__file__).parent / "kernels"
THREADS, TILES, SHARED = 256, (32, 64), 33792  # as in grid.cuh and inverse.cuh
NARROW, WIDE, TRUNCATED, ENDING = range(4)  # as in backward.cu
LONG = 512  # columns longer than this are cut into parts

# Blocks that meet wait for a number that nobody wrote before, so memory need not be cleared. A call uses up to 64.
_tokens = itertools.count(int.from_bytes(os.urandom(7), "little") << 6, 64)


def _structure(name: str, pointers: str, sizes: str) -> type[ctypes.Structure]:
    fields = [*((p, ctypes.c_void_p) for p in pointers.split()), ("token", ctypes.c_uint64)]
    return type(name, (ctypes.Structure,), {"_fields_": [*fields, *((size, ctypes.c_int) for size in sizes.split())]})


# As in the sources of the same names.
_Forward = _structure("Forward", "v u reciprocal t w out work flags", "batch n l truncated chunks splits")
_Backward = _structure("Backward", "z u t reciprocal q w a b dv work parts flags", "kind batch n l chunks splits")
_Blocks = _structure("Blocks", "gram t work flags", "batch l width unit")


class Plan(NamedTuple):
    """How a call is cut: rows into ``chunks`` for sums over columns, and into ``splits`` for products over rows."""

    kernel: nvrtc.Kernel
    blocks: int
    chunks: int
    splits: int

    def parts(self, count: int, size: int) -> int:
        """How many numbers of 8 bytes hold the parts of sums, for ``count`` matrices of ``size`` columns."""
        return count * size * max(self.chunks, self.splits * size if self.splits > 1 else 0)

    def workspace(self, like: Tensor, numbers: int) -> tuple[Tensor, int]:
        """Memory for the flags and ``numbers`` of 8 bytes, and the address of these."""
        work = torch.empty(2 * self.blocks + numbers, dtype=torch.float64, device=like.device)
        return work, work.data_ptr() + 16 * self.blocks

    def launch(self, device: int, fields: ctypes.Structure) -> None:
        if device == torch.cuda.current_device():
            self.kernel((self.blocks, 1), THREADS, fields, cooperative=True)
        else:
            with torch.cuda.device(device):
                self.kernel((self.blocks, 1), THREADS, fields, cooperative=True)


@functools.lru_cache(maxsize=1024)
def plan(source: str, name: str, count: int, n: int, size: int, device: int) -> Plan:
    """For ``count`` matrices ``n`` x ``size``: large tiles where there are many."""
    with torch.cuda.device(device):
        for tile in TILES:
            kernel = nvrtc.kernel(KERNELS / source, name, {"TILE": tile}, SHARED)
            fit, down, across = kernel.blocks(THREADS), -(-n // tile), -(-size // tile)
            tiles = count * down * max(across, down if n <= LONG else 1)
            if tiles <= 4 * fit:
                break
    columns, grams, chunks, splits = count * -(-size // 8), count * across * (across + 1) // 2, 1, 1
    if n > LONG:
        chunks = max(1, min(fit // columns, n // 128))
        splits = max(1, min(fit // grams, n // max(128, 4 * size)))
    return Plan(kernel, min(fit, max(tiles, columns * chunks, grams * splits)), chunks, splits)


def forward(v: Tensor, wanted: str) -> tuple[Tensor, ...]:
    """From vectors to factors, and to what is wanted.

    Args:
        v: ``(*, N, L)``, float32, on an NVIDIA GPU.
        wanted: "factors"; "w" ``(*, N, L)``, that is UT; "matrix" ``(*, N, N)``; or "truncated" ``(*, N, L)``.

    Returns:
        u, t, the reciprocal norms ``(*, 1, L)``, and what else is wanted.
    """
    v, (*batch, n, size) = v.contiguous(), v.shape
    count, device, truncated = math.prod(batch), v.get_device(), wanted == "truncated"
    cut = plan("forward.cu", "forward", count, n, size, device)
    u, t, reciprocal = torch.empty_like(v), v.new_empty((*batch, size, size)), v.new_empty((*batch, 1, size))
    square = count * size * size
    inner = count * n * size if wanted == "matrix" else square if truncated else 0
    results = [v.new_empty((*batch, n, n)) if wanted == "matrix" else torch.empty_like(v)] if wanted != "factors" else []
    sums = cut.parts(count, size)
    work, begin = cut.workspace(v, 2 * square + sums + (inner + 1) // 2)
    address = results[0].data_ptr() if results else None
    w, out = (begin + 8 * (2 * square + sums), address) if inner else (address, None)
    pointers = v.data_ptr(), u.data_ptr(), reciprocal.data_ptr(), t.data_ptr(), w, out, begin, work.data_ptr()
    cut.launch(device, _Forward(*pointers, next(_tokens), count, n, size, truncated, cut.chunks, cut.splits))
    return u, t, reciprocal, *results


def backward(
    kind: int, u: Tensor, t: Tensor, reciprocal: Tensor, z: Tensor | None = None, q: Tensor | None = None,
    given: tuple[Tensor, ...] = (),
) -> Tensor:  # fmt: skip
    """The gradient of the vectors.

    Args:
        kind: NARROW (L < N) or WIDE (L >= N) for a matrix, TRUNCATED, or ENDING, where W, A and B are ``given``.
        u, t, reciprocal: what :func:`forward` returned.
        z: the gradient of the result.
        q: the matrix, if WIDE.
        given: three of ``(*, N, L)``, if ENDING.

    Returns:
        ``(*, N, L)``.
    """
    *batch, n, size = u.shape
    count, device = math.prod(batch), u.get_device()
    cut = plan("backward.cu", "backward", count, n, size, device)
    dv = torch.empty_like(u)
    long, square = n * size, size * size
    floats = count * {NARROW: square + 4 * long, WIDE: square + 2 * long + n * n, TRUNCATED: 5 * square, ENDING: square}[kind]
    sums = cut.parts(count, size)
    work, begin = cut.workspace(u, sums + (floats + 1) // 2)
    z = None if z is None else z.contiguous()
    w, a, b = (x.data_ptr() for x in given) if given else (None, None, None)
    pointers = _address(z), u.data_ptr(), t.data_ptr(), reciprocal.data_ptr(), _address(q), w, a, b, dv.data_ptr()
    fields = *pointers, begin + 8 * sums, begin, work.data_ptr(), next(_tokens), kind, count, n, size, cut.chunks, cut.splits
    cut.launch(device, _Backward(*fields))
    return dv


def invert_blocks(gram: Tensor, width: int, unit: bool = False) -> Tensor:
    r"""$S^{-1}$ for ``gram`` $= U^\top U$ ``(*, L, L)``: the blocks of ``width`` along its diagonal, and zeros below."""
    *batch, _, size = gram.shape
    count, device, blocks = math.prod(batch), gram.get_device(), -(-size // width)
    cut = plan("blocks.cu", "invert_blocks", count * blocks, width, width, device)
    t = torch.empty_like(gram)
    work, begin = cut.workspace(gram, count * blocks * width * width)
    pointers = gram.data_ptr(), t.data_ptr(), begin, work.data_ptr()
    cut.launch(device, _Blocks(*pointers, next(_tokens), count, size, width, unit))
    return t


def normalise(v: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`composite.normalise`, for matrices of many columns."""
    v, (*batch, n, size) = v.contiguous(), v.shape
    u, reciprocal = torch.empty_like(v), v.new_empty((*batch, 1, size))
    _over_columns("normalise", v.get_device(), math.prod(batch), n, size, v, u, reciprocal)
    return u, reciprocal


def project_(du: Tensor, u: Tensor, reciprocal: Tensor, norm: Tensor | None = None) -> Tensor:
    """The gradient of v from that of u, in its place, for matrices of many columns; ``norm`` as in :mod:`.halves`."""
    *batch, n, size = u.shape
    _over_columns("project", u.get_device(), math.prod(batch), n, size, u, reciprocal, du, norm)
    return du


def _over_columns(name: str, device: int, count: int, n: int, size: int, *tensors: Tensor | None) -> None:
    with torch.cuda.device(device):
        kernel = nvrtc.kernel(KERNELS / "blocks.cu", name, {"TILE": TILES[0]}, SHARED)
        kernel((count * -(-size // 8), 1), THREADS, *tensors, count, n, size)


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
