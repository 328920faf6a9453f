"""How the kernels divide a rollout: the macros of a source, its shared memory and its clusters."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from .. import _nvrtc
from .nonlinearities import SLOPE

KERNELS = Path(__file__).parent / "kernels"
BLOCK_UNITS = 256
"""The most units that one block holds."""
CLUSTER_UNITS = 1024
"""The most units that a cluster holds."""
CLUSTER_BLOCK_ROWS = 64
"""Rows of Q of each block of a cluster."""
CLUSTER_THREADS = 256
"""Threads of such a block."""
CLUSTER_REFLECTIONS = 256
"""The most reflections that a cluster holds in low-rank form."""
LOW_RANK_UNITS = 2048
"""The most units that a cluster holds in low-rank form."""
BLOCK_SHARED_BYTES = 227 * 1024
"""Shared memory that a block can have."""
FORWARD, ADJOINT, RECOVER = range(3)
MODES = {"FORWARD": FORWARD, "ADJOINT": ADJOINT, "RECOVER": RECOVER}
NONLINEARITIES = {
    name: code
    for code, name in enumerate(("modrelu", "abs", "relu", "leaky_relu", "tanh", "identity"))
}

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The types of numbers that kernels read and write. All arithmetic is float32."""

# `one` and `two` are read at each step. They are x (FORWARD), states (z for abs) and the gradient
# from outside (ADJOINT), x and -1 where z is negative, else 1 (RECOVER). `start` is the state
# before the first step, or the gradient that reaches the last one. `end` is the last state, or the
# gradient that leaves the first step. `rounded` gets the numbers of `out` in half precision. Rows
# of a step begin at `offsets` if lengths differ. Absent tensors are null.
Tensors = _nvrtc.structure(
    "Tensors",
    one="const void*",
    two="const void*",
    bias="const float*",
    start="const float*",
    offsets="const int*",
    lengths="const int*",
    out="float*",
    rounded="void*",
    extra="float*",
    end="float*",
    dbias="float*",
    n="int",
    batch="int",
    steps="int",
)


class Variant(NamedTuple):
    """Describe what a kernel is compiled for, apart from sizes.

    Attributes:
        mode: FORWARD, ADJOINT or RECOVER.
        nonlinearity: its name.
        packed: whether sequences differ in length.
        reads_two: whether each step reads ``two`` of :data:`Tensors`.
        writes_out: whether each step writes ``out``.
        writes_extra: whether each step writes ``extra``.
        one, two, rounded: the types of the numbers of these tensors. If ``rounded`` is float32,
            it is not written.
    """

    mode: int
    nonlinearity: str
    packed: bool = False
    reads_two: bool = False
    writes_out: bool = True
    writes_extra: bool = False
    one: torch.dtype = torch.float32
    two: torch.dtype = torch.float32
    rounded: torch.dtype = torch.float32

    @property
    def macros(self) -> _nvrtc.Macros:
        """Return the macros of ``common.cuh`` that this sets."""
        names = {name.upper(): code for name, code in NONLINEARITIES.items()}
        types = {str(dtype).removeprefix("torch.").upper(): code for dtype, code in TYPES.items()}
        return {
            **MODES,
            **names,
            **types,
            "MODE": self.mode,
            "NONLINEARITY": NONLINEARITIES[self.nonlinearity],
            "SLOPE": SLOPE,
            "PACKED": int(self.packed),
            "READS_TWO": int(self.reads_two),
            "WRITES_OUT": int(self.writes_out),
            "WRITES_EXTRA": int(self.writes_extra),
            "ONE_TYPE": TYPES[self.one],
            "TWO_TYPE": TYPES[self.two],
            "ROUNDED_TYPE": TYPES[self.rounded],
        }


@dataclass(frozen=True)
class Tiling:
    """Describe one way to divide a rollout.

    Attributes:
        source: the file of the kernel.
        macros: its macros, apart from those of a :class:`Variant`.
        sequences: sequences of a block, or of a cluster.
        units: units that a lane finishes, each with a place in the ring of inputs.
        shared: floats of shared memory, apart from that ring.
    """

    source: str
    macros: dict[str, int]
    sequences: int
    units: int
    shared: int

    @property
    def threads(self) -> int:
        """Return the threads of a block."""
        return self.macros["THREADS"]

    @property
    def cluster(self) -> int:
        """Return the blocks of a cluster."""
        return self.macros.get("CLUSTER", 1)

    def blocks(self, batch: int) -> int:
        """Return the blocks that so many sequences take."""
        return -(-batch // self.sequences) * self.cluster

    def kernel(self, variant: Variant) -> _nvrtc.Kernel:
        """Compile the kernel for a variant."""
        inputs = 1 + int(variant.reads_two)
        ring = self.macros["DEPTH"] * inputs * self.units * self.threads
        shared = self.shared + ring
        macros = {**self.macros, **variant.macros, "SHARED_FLOATS": shared}
        return _nvrtc.kernel(
            KERNELS / self.source,
            "rollout",
            macros,
            shared=4 * shared,
            large_clusters=self.cluster > 8,
            structures=(Tensors,),
        )


def _left_after(values: int, half: int) -> int:
    """Return how many of its sums a lane finishes, as ``left_after`` in common.cuh."""
    if half == 0:
        return values
    return _left_after((values + 1) // 2, half // 2)


def block(n: int, batch: int, processors: int) -> Tiling:
    """Hold Q in the registers of one block, for one or two sequences.

    Above 224 units a part of it is in shared memory.
    """
    columns = -(-n // 32) * 32
    lanes = 8
    threads = 256
    if columns <= 128:
        threads = 128
    sequences = 1
    if batch > processors and columns <= 192:
        sequences = 2
    rows = columns * lanes // threads
    vectors = columns // 32
    kept = vectors
    if columns == 256:
        kept = 6
    macros = {
        "SEQUENCES": sequences,
        "THREADS": threads,
        "LANES": lanes,
        "ROWS": rows,
        "VECTORS": vectors,
        "KEPT_VECTORS": kept,
        "DEPTH": 8,
    }
    shared = 2 * sequences * columns + rows * (vectors - kept) * 4 * threads
    units = _left_after(sequences * rows, lanes // 2)
    return Tiling("block.cu", macros, sequences, units, shared)


def cluster(n: int, batch: int, mode: int, device: int) -> Tiling:
    """Hold Q, in split fp16, in the registers of a block for each 64 units.

    Above 512 units a part of it is in shared memory.
    """
    blocks = -(-n // CLUSTER_BLOCK_ROWS)
    at_once = clusters(blocks, device)
    tiles = 1
    if batch > 8 * at_once:
        tiles = 2
    waves = -(-batch // (8 * tiles * at_once))
    tile_sequences = -(-batch // (tiles * at_once * waves))
    # Passes in turn are faster than tiles at once, unless registers run out.
    passes = tiles
    if blocks > 8 and mode != FORWARD:
        passes = 1
    exchanged = _exchanged(blocks, tiles, tile_sequences)
    ring_of_two_inputs = 4096
    room = BLOCK_SHARED_BYTES // 4 - 64 - exchanged - ring_of_two_inputs
    kept = max(min(blocks, 8), blocks - room // 4096)
    macros = {
        "CLUSTER": blocks,
        "TILE_SEQUENCES": tile_sequences,
        "PASSES": passes,
        "PASS_TILES": tiles // passes,
        "KEPT_TILES": kept,
        "BLOCK_ROWS": CLUSTER_BLOCK_ROWS,
        "THREADS": CLUSTER_THREADS,
        "DEPTH": 2,
    }
    shared = exchanged + 4096 * (blocks - kept)
    return Tiling("cluster.cu", macros, tiles * tile_sequences, 4, shared)


def _exchanged(blocks: int, tiles: int, tile_sequences: int) -> int:
    """Return the floats of shared memory of cluster.cu for states and partial sums."""
    return 128 * tiles * blocks * tile_sequences + 64 * tiles * blocks + 2048 * tiles


def factored(n: int, reflections: int, batch: int, device: int) -> Tiling:
    """Hold both factors, in split fp16, in the registers of 8 blocks, or of 16 above 1024 units.

    With many reflections a part of them is in shared memory.
    """
    blocks = 8
    if n > CLUSTER_UNITS:
        blocks = 16
    warps = 8
    row_tiles = -(-n // (16 * blocks))
    factor_tiles = -(-reflections // 16)
    at_once = clusters(blocks, device)
    waves = -(-batch // (at_once * 8))
    sequences = -(-batch // (at_once * waves))
    warp_tiles = -(-factor_tiles // warps)
    kept_down, kept_up = _kept_tiles(warp_tiles, row_tiles, factor_tiles)
    macros = {
        "CLUSTER": blocks,
        "SEQUENCES": sequences,
        "ROW_TILES": row_tiles,
        "FACTOR_TILES": factor_tiles,
        "KEPT_DOWN": kept_down,
        "KEPT_UP": kept_up,
        "THREADS": 32 * warps,
        "DEPTH": 2,
    }
    tiles = row_tiles + factor_tiles
    exchanged = 4 + 16 * sequences * tiles + 128 * blocks * -(-factor_tiles // blocks) + 8 * tiles
    spilled = warp_tiles * (row_tiles - kept_down) + factor_tiles - kept_up
    return Tiling("factored.cu", macros, sequences, 4, exchanged + 2048 * spilled)


def _kept_tiles(warp_tiles: int, row_tiles: int, factor_tiles: int) -> tuple[int, int]:
    """Return how many tiles of either factor are in registers: as large a share of both."""
    most = 16
    held = warp_tiles * row_tiles + factor_tiles
    if held <= most:
        return row_tiles, factor_tiles
    down = max(1, row_tiles * most // held)
    return down, most - warp_tiles * down


@functools.cache
def clusters(blocks: int, device: int) -> int:
    """Return how many clusters of so many blocks run at once on a GPU."""
    kept = min(blocks, 8)
    macros = {
        "CLUSTER": blocks,
        "TILE_SEQUENCES": 1,
        "PASSES": 1,
        "PASS_TILES": 1,
        "KEPT_TILES": kept,
        "BLOCK_ROWS": CLUSTER_BLOCK_ROWS,
        "THREADS": CLUSTER_THREADS,
        "DEPTH": 2,
    }
    shared = _exchanged(blocks, 1, 1) + 4096 * (blocks - kept)
    probe = Tiling("cluster.cu", macros, 1, 4, shared)
    kernel = probe.kernel(Variant(FORWARD, "modrelu"))
    return max(1, kernel.clusters(CLUSTER_THREADS, blocks))
