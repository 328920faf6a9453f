"""How the kernels are cut: for N units and a batch, the macros of a source, its shared memory and its clusters."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from .. import nvrtc

KERNELS = Path(__file__).parent / "kernels"
BLOCK, CLUSTER = 256, 1024  # the most units that a block, and a cluster, hold
FACTORS = 256  # the most reflections that a cluster holds as factors
SHARED = 227 * 1024  # bytes of shared memory that a block can have
FORWARD, ADJOINT, RECOVER = range(3)


@dataclass(frozen=True)
class Shape:
    """One way to cut a rollout.

    Attributes:
        source: file among the kernels.
        macros: its macros, but for those of what is asked.
        sequences: that a block, or a cluster, runs.
        units: that a lane finishes, each with a place in the ring of inputs.
        shared: floats of shared memory, but for that ring.
    """

    source: str
    macros: dict[str, int]
    sequences: int
    units: int
    shared: int

    @property
    def threads(self) -> int:
        return self.macros["THREADS"]

    @property
    def cluster(self) -> int:
        return self.macros.get("C", 1)

    def blocks(self, batch: int) -> int:
        return -(-batch // self.sequences) * self.cluster

    def kernel(self, what: dict[str, int]) -> nvrtc.Kernel:
        """Compiled for what is asked."""
        macros = self.macros | what
        ring = macros["D"] * (1 + macros["TWO"]) * self.units * self.threads
        return nvrtc.kernel(KERNELS / self.source, "rollout", macros, 4 * (self.shared + ring), self.cluster > 8)


def _left_after(values: int, half: int) -> int:
    """How many of its sums a lane finishes, as in common.cuh."""
    return values if half == 0 else _left_after((values + 1) // 2, half // 2)


def block(n: int, batch: int, processors: int) -> Shape:
    """Q in the registers of one block for a sequence, or two; above 224 units, some of it in shared memory."""
    padded = -(-n // 32) * 32
    threads, lanes, columns = 128 if padded <= 128 else 256, 8, padded // 32
    s = 2 if batch > processors and padded <= 192 else 1
    r, kept = padded * lanes // threads, 6 if padded == 256 else columns
    macros = {"S": s, "THREADS": threads, "G": lanes, "W": 4, "R": r, "J": columns, "JR": kept, "D": 8}
    return Shape("block.cu", macros, s, _left_after(s * r, lanes // 2), 2 * s * padded + r * (columns - kept) * 4 * threads)


def cluster(n: int, batch: int, mode: int, device: int) -> Shape:
    """Q, as two halves, in the registers of a block for each 64 units; above 512, some of it in shared memory."""
    c = -(-n // 64)
    s, fit = 8, clusters(c, device)
    tiles = 1 if batch <= s * fit else 2
    waves = -(-batch // (s * tiles * fit))
    s = -(-batch // (tiles * fit * waves))
    # In turn is faster than at once, unless registers run out.
    passes = 1 if c > 8 and mode != FORWARD else tiles
    shared = 128 * tiles * c * s + 64 * tiles * c + 2048 * tiles
    room = SHARED // 4 - 64 - shared - 4096  # the ring of two inputs
    kept = max(min(c, 8), c - room // 4096)
    macros = {"C": c, "SP": s, "PASSES": passes, "NT": tiles // passes, "KR": kept, "THREADS": 256, "D": 2}
    return Shape("cluster.cu", macros, tiles * s, 4, shared + 4096 * (c - kept))


def factored(n: int, reflections: int, batch: int, device: int) -> Shape:
    """Both factors, as two halves, in the registers of 8 blocks; of many reflections, a part in shared memory."""
    c, warps = 8, 8
    rows, tiles = -(-n // (16 * c)), -(-reflections // 16)
    s, fit = 8, clusters(c, device)
    s = -(-batch // (fit * -(-batch // (fit * s))))
    m = -(-tiles // warps)
    down, up = _kept(m, rows, tiles)
    macros = {"C": c, "S": s, "RT": rows, "LT": tiles, "KR1": down, "KR2": up, "THREADS": 32 * warps, "D": 2}
    shared = 4 + 16 * s * (rows + tiles) + 128 * c * -(-tiles // c) + 8 * (rows + tiles)
    return Shape("factored.cu", macros, s, 4, shared + 2048 * (m * (rows - down) + tiles - up))


def _kept(m: int, rows: int, tiles: int, most: int = 16) -> tuple[int, int]:
    """How much of either factor is in registers: as large a share of one as of the other."""
    held = m * rows + tiles
    if held <= most:
        return rows, tiles
    down = max(1, rows * most // held)
    return down, most - m * down


@functools.cache
def clusters(c: int, device: int) -> int:
    """How many clusters of c blocks run at once on a GPU."""
    kept = min(c, 8)
    macros = {"C": c, "SP": 1, "PASSES": 1, "NT": 1, "KR": kept, "THREADS": 256, "D": 2}
    probe = Shape("cluster.cu", macros, 1, 4, 128 * c + 64 * c + 2048 + 4096 * (c - kept))
    what = {"MODE": 0, "F": 0, "PACKED": 0, "OUT": 1, "EXTRA": 0, "TWO": 0}
    return max(1, probe.kernel(what).clusters(256, c))
