"""The kernels that go from vectors to a matrix, and from its gradient to theirs, in one launch each."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _nvrtc
from .composite import largest_reciprocal

KERNELS = Path(__file__).parent / "kernels"
THREADS, SHARED = 256, 40960  # as in sums.cuh and solve.cuh
ONE, MANY = (32, 8), (64, 32)  # the sides of tiles, and the columns summed at once, as in sums.cuh
NARROW, WIDE, TRUNCATED, ENDING, FACTORS = range(5)  # as in backward.cu
WIDE_CLUSTER, NEAR = (
    16,
    128,
)  # of matrices of no more rows and columns, a cluster is faster than more blocks
FULL, WIDE_COLUMNS = (
    1024,
    16,
)  # threads, and columns, of a block that takes nothing but columns, as in blocks.cu
LONG = 512  # columns longer than this are cut into parts
# RECIPROCAL is the power of two that bounds reciprocal norms.
MACROS = {"RECIPROCAL": int(math.log2(largest_reciprocal(torch.float32)))}

# Blocks that meet wait for a number that nobody wrote before, so memory need not be cleared. A call uses up to 64.
_tokens = itertools.count(int.from_bytes(os.urandom(7), "little") << 6, 64)


def _structure(name: str, pointers: str, sizes: str) -> type[ctypes.Structure]:
    fields = [*((p, ctypes.c_void_p) for p in pointers.split()), ("token", ctypes.c_uint64)]
    return type(
        name,
        (ctypes.Structure,),
        {"_fields_": [*fields, *((size, ctypes.c_int) for size in sizes.split())]},
    )


# As in the sources of the same names.
_Forward = _structure(
    "Forward", "v signs u reciprocal t y out work flags", "batch n l truncated chunks splits groups"
)
_Backward = _structure(
    "Backward",
    "z u factor reciprocal signs q w a b dv work parts flags",
    "batch n l chunks splits groups",
)
_Blocks = _structure("Blocks", "gram t work flags", "batch l width")


class Plan(NamedTuple):
    """How a call is cut: the batch among ``groups`` of blocks, which wait for their own alone; rows into ``chunks`` for sums
    over columns, and into ``splits`` for products over rows; ``parts`` numbers of 8 bytes hold the parts of those sums."""

    launch: Callable[[ctypes.Structure], None]
    blocks: int
    chunks: int
    splits: int
    groups: int
    parts: int


@functools.lru_cache(maxsize=1024)
def plan(
    source: str,
    name: str,
    count: int,
    n: int,
    size: int,
    device: int,
    apart: bool = True,
    kind: int | None = None,
) -> Plan:
    """For ``count`` matrices ``n`` x ``size``, each ``apart`` from the others or not; a ``kind`` is compiled by itself."""
    macros = MACROS if kind is None else MACROS | {"KIND": kind}
    cluster = _cluster(device)
    wide = cluster == WIDE_CLUSTER
    with torch.cuda.device(device):
        kernel = _nvrtc.kernel(KERNELS / source, name, macros, SHARED, wide)
        many = apart and _many(count, n, size, kernel.blocks(THREADS))
        if many:
            kernel = _nvrtc.kernel(KERNELS / source, name, macros | {"MANY": 1}, SHARED, wide)
        fit = kernel.blocks(THREADS)
    tile, summed = MANY if many else ONE
    across = -(-size // tile)
    groups = min(count, fit) if apart else 1
    room, own = fit // groups, -(-count // groups)
    columns, grams, chunks, splits = (
        own * -(-size // summed),
        own * across * (across + 1) // 2,
        1,
        1,
    )
    if n > LONG:
        chunks = max(1, min(room // columns, n // 128))
        splits = max(1, min(room // grams, n // max(128, min(4 * size, 256))))
    panels = own * (-(-n // 8) + -(-size // 8))
    each = min(room, max(own * _tiles(n, size, tile), panels, columns * chunks, grams * splits))
    if apart and wide and max(n, size) <= NEAR:
        each = min(each, cluster)
    if 1 < each <= cluster and kernel.clusters(THREADS, each) >= groups:
        launch = kernel.prepare((groups * each, 1), THREADS, cluster=each)
    else:
        launch = kernel.prepare((groups * each, 1), THREADS, cooperative=True)
    parts = count * max(size * chunks, splits * _padded(size) ** 2 if splits > 1 else 0)
    return Plan(launch, groups * each, chunks, splits, groups, parts)


def _cluster(device: int) -> int:
    """The most blocks of a cluster, which meets sooner than blocks by flags; 0 where there are no clusters."""
    major, _ = torch.cuda.get_device_capability(device)
    return WIDE_CLUSTER if major in (9, 10) else 8 if major >= 9 else 0


def _tiles(n: int, size: int, tile: int) -> int:
    return -(-n // tile) * -(-size // tile)


def _many(count: int, n: int, size: int, fit: int) -> bool:
    """Whether large tiles are enough to keep all of the blocks busy that ``fit``."""
    groups = min(count, fit)
    return (
        ONE[0] < min(n, size)
        and n <= LONG
        and -(-count // groups) * _tiles(n, size, MANY[0]) >= fit // groups
    )


def forward(
    v: Tensor, wanted: str, keep: bool = True, signs: Tensor | None = None
) -> tuple[Tensor, ...]:
    """From vectors to factors, and to what is wanted.

    Args:
        v: ``(*, N, L)``, float32, on an NVIDIA GPU.
        wanted: "factors"; "y" ``(*, N, L)``, that is U T^T; "matrix" ``(*, N, N)``; or "truncated" ``(*, N, L)``.
        keep: whether to return what the gradient takes, too.
        signs: ``(*, N)``, of the columns of a "matrix", or ``(*, L)`` if "truncated".

    Returns:
        u, t, the reciprocal norms ``(*, 1, L)``, and what else is wanted; or the last alone. Of a matrix with L >= N y, not t.
    """
    v, (*batch, n, size) = v.contiguous(), v.shape
    count, truncated, wide = (
        math.prod(batch),
        wanted == "truncated",
        keep and wanted == "matrix" and size >= n,
    )
    cut = plan("forward.cu", "forward", count, n, size, v.get_device())
    long, square = count * n * size, count * size * size
    inner = square if truncated else long if wanted == "matrix" and not wide else 0
    numbers = count * _padded(size) ** 2 + cut.parts
    work = _workspace(v, cut, numbers, inner if keep else inner + long + count * size)
    address = work.data_ptr()
    flags = address + 8 * numbers
    free = flags + 8 * cut.blocks
    if keep:
        kept = (
            torch.empty_like(v),
            v.new_empty((*batch, n if wide else size, size)),
            v.new_empty((*batch, 1, size)),
        )
        u, factor, reciprocal = (x.data_ptr() for x in kept)
    else:
        kept, u, factor, reciprocal = (), free + 4 * inner, None, free + 4 * (inner + long)
    results = (
        (v.new_empty((*batch, n, n)) if wanted == "matrix" else torch.empty_like(v),)
        if wanted != "factors"
        else ()
    )
    result = results[0].data_ptr() if results else None
    t, y, out = (
        (None, factor, result)
        if wide
        else (factor, free, result)
        if inner
        else (factor, result, None)
    )
    pointers = v.data_ptr(), _address(signs), u, reciprocal, t, y, out, address, flags
    cut.launch(
        _Forward(
            *pointers, next(_tokens), count, n, size, truncated, cut.chunks, cut.splits, cut.groups
        )
    )
    return *kept, *results


def backward(
    kind: int, u: Tensor, factor: Tensor, reciprocal: Tensor, z: Tensor | None = None, q: Tensor | None = None,
    given: tuple[Tensor | None, ...] = (None, None, None), signs: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of the vectors.

    Args:
        kind: NARROW (L < N) or WIDE (L >= N) for a matrix, TRUNCATED, ENDING, where W, A and B are ``given``, or FACTORS.
        u, factor, reciprocal: what :func:`forward` returned, y as the factor if WIDE and else t.
        z: the gradient of the result.
        q: the matrix, if WIDE.
        given: of ENDING W, A and B, ``(*, N, L)``, the last two of the gradient times the signs; of FACTORS None, and the
            gradients of u (None for zero) and of t.
        signs: as in :func:`forward`, of the other kinds.

    Returns:
        ``(*, N, L)``.
    """
    *batch, n, size = u.shape
    count = math.prod(batch)
    cut = plan("backward.cu", "backward", count, n, size, u.get_device(), kind=kind)
    long, square = n * size, size * size
    floats = {
        NARROW: square + 4 * long,
        WIDE: square + long + n * n,
        TRUNCATED: 5 * square,
        ENDING: square,
        FACTORS: 2 * square,
    }[kind]
    dv, work = torch.empty_like(u), _workspace(u, cut, cut.parts, count * floats)
    parts = work.data_ptr()
    flags = parts + 8 * cut.parts
    z, *rest = (None if x is None else x.contiguous() for x in (z, *given))
    w, a, b = (_address(x) for x in rest)
    pointers = (
        _address(z),
        u.data_ptr(),
        factor.data_ptr(),
        reciprocal.data_ptr(),
        _address(signs),
        _address(q),
        w,
        a,
        b,
        dv.data_ptr(),
    )
    places = *pointers, flags + 8 * cut.blocks, parts, flags, next(_tokens)
    cut.launch(_Backward(*places, count, n, size, cut.chunks, cut.splits, cut.groups))
    return dv


def invert_blocks(gram: Tensor, width: int) -> Tensor:
    r"""$S^{-1}$ for ``gram`` $= U^\top U$ ``(*, L, L)``: the blocks of ``width`` along its diagonal, and zeros below."""
    *batch, _, size = gram.shape
    count, blocks = math.prod(batch), -(-size // width)
    cut = plan(
        "blocks.cu", "invert_blocks", count * blocks, width, width, gram.get_device(), apart=False
    )
    numbers = count * blocks * width * width
    t, work = torch.empty_like(gram), _workspace(gram, cut, numbers)
    address = work.data_ptr()
    pointers = gram.data_ptr(), t.data_ptr(), address, address + 8 * numbers
    cut.launch(_Blocks(*pointers, next(_tokens), count, size, width))
    return t


def normalise(v: Tensor, widen: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """As :func:`composite.normalise`, for matrices of many columns; and u in float64, if that is wanted."""
    v, (*batch, n, size) = v.contiguous(), v.shape
    u, reciprocal = torch.empty_like(v), v.new_empty((*batch, 1, size))
    wide = torch.empty_like(v, dtype=torch.float64) if widen else None
    count = math.prod(batch)
    _over_columns("normalise", count, size, v.get_device())(v, u, wide, reciprocal, count, n, size)
    return u, reciprocal, wide


def project_(du: Tensor, u: Tensor, reciprocal: Tensor, norm: Tensor | None = None) -> Tensor:
    """The gradient of v from that of u, in its place, for matrices of many columns; ``norm`` as in :mod:`.halves`."""
    *batch, n, size = u.shape
    count = math.prod(batch)
    _over_columns("project", count, size, u.get_device())(u, reciprocal, du, norm, count, n, size)
    return du


@functools.lru_cache(maxsize=1024)
def _over_columns(name: str, count: int, size: int, device: int) -> Callable[..., None]:
    with torch.cuda.device(device):
        return _nvrtc.kernel(KERNELS / "blocks.cu", name, MACROS, SHARED).prepare(
            (count * -(-size // WIDE_COLUMNS), 1), FULL
        )


def _workspace(like: Tensor, cut: Plan, numbers: int, floats: int = 0) -> Tensor:
    """Memory for ``numbers`` of 8 bytes, then the flags, then ``floats``."""
    return torch.empty(
        numbers + cut.blocks + (floats + 1) // 2, dtype=torch.float64, device=like.device
    )


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
