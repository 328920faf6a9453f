"""How the kernels are cut: for N units and a batch, the macros of a source, its threads, shared memory and clusters."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import nvrtc

KERNELS = Path(__file__).parent / "kernels"
BLOCK, CLUSTER = 256, 1024  # the most units that a block, and a cluster, hold
FACTORS = 256  # the most reflections that a cluster holds as factors


@dataclass(frozen=True)
class Shape:
    """One way to cut a rollout.

    Attributes:
        source: file among the kernels.
        macros: its macros, but for those of the mode.
        units: how many units a lane finishes, each with a place in the ring of inputs.
        shared: floats of shared memory, but for that ring.
    """

    source: str
    macros: dict[str, int]
    units: int
    shared: int

    def kernel(self, mode: dict[str, int]) -> nvrtc.Kernel:
        """Compiled for a mode."""
        macros = self.macros | mode
        ring = macros["D"] * (1 + macros["TWO"]) * self.units * macros["THREADS"]
        return nvrtc.kernel(KERNELS / self.source, "rollout", macros, 4 * (self.shared + ring), macros["C"] > 8)

    def blocks(self, batch: int) -> int:
        return -(-batch // self.macros["S"]) * self.macros["C"]


def _left_after(values: int, half: int) -> int:
    """How many of its sums a lane finishes, as in common.cuh."""
    return values if half == 0 else _left_after((values + 1) // 2, half // 2)


def _formed(c: int, s: int, sg: int, threads: int, g: int, r: int, j: int, kept: int, d: int) -> Shape:
    macros = {"C": c, "S": s, "SG": sg, "THREADS": threads, "G": g, "W": 4, "R": r, "J": j, "JR": kept, "D": d}
    stage = s * r * threads // g if c > 1 else 0
    shared = 2 * s * j * g * 4 + stage + r * (j - kept) * 4 * threads
    return Shape("formed.cu", macros, s // sg * _left_after(sg * r, g // 2), shared)


def in_block(n: int, batch: int, processors: int) -> Shape:
    """Q in the registers of one block a sequence, or two; above 224 units, some of it in shared memory."""
    padded = -(-n // 32) * 32
    threads = 128 if padded <= 128 else 256
    s = 2 if batch > processors and padded <= 192 else 1
    j = padded // 32
    return _formed(1, s, s, threads, 8, padded * 8 // threads, j, min(j, 6) if padded == 256 else j, 8)


def in_cluster(n: int, batch: int) -> Shape:
    """Q in the registers of 8 blocks, or in registers and shared memory of 16."""
    if n <= 512:
        rows = -(-n // 64) * 8
        s, sg = _sequences(batch, 8, {1: 1, 2: 2, 3: 3, 4: 2, 6: 3, 9: 3})
        return _formed(8, s, sg, 4 * rows, 16, 4, rows // 8, rows // 8, 4)
    rows = -(-n // 128) * 8
    s, sg = _sequences(batch, 16, {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 10: 5})
    return _formed(16, s, sg, 4 * rows, 32, 8, rows // 8, min(rows // 8, 4), 2)


def factored(n: int, reflections: int, batch: int) -> Shape:
    """Both factors in the registers of 8 blocks; of many reflections, a part in shared memory."""
    c, threads, g, w = 8, 256, 16, 4
    r2, r1 = -(-n // (c * 16)), -(-reflections // 64) * 4
    rows, padded = 16 * r2, 16 * r1
    j1, j2 = -(-rows // 64), padded // 64
    kept = min(j2, max(1, (144 - r1 * j1 * w) // (r2 * w)))
    s, _ = _sequences(batch, c, {k: k for k in range(1, 6 if padded > 128 else 9)})
    macros = {"C": c, "S": s, "THREADS": threads, "G": g, "W": w, "R1": r1, "J1": j1, "JR1": j1, "R2": r2, "J2": j2}
    shared = s * j1 * g * w + s * padded * (1 + 2 * c) + r2 * (j2 - kept) * w * threads
    return Shape("factored.cu", macros | {"JR2": kept, "D": 2}, _left_after(s * r2, g // 2), shared)


def _sequences(batch: int, c: int, allowed: dict[int, int]) -> tuple[int, int]:
    """Sequences a cluster, and of them at once, such that the fewest waves serve."""
    fit = clusters(c, torch.cuda.current_device())
    waves = -(-batch // (fit * max(allowed)))
    wanted = -(-batch // (fit * waves))
    return next((s, sg) for s, sg in sorted(allowed.items()) if s >= wanted)


@functools.cache
def clusters(c: int, device: int) -> int:
    """How many clusters of c blocks run at once on a GPU."""
    probe = _formed(c, 1, 1, 256, 16, 4, 4, 4, 2)
    modes = {"MODE": 0, "F": 0, "PACKED": 0, "OUT": 1, "EXTRA": 0, "TWO": 0}
    return max(1, probe.kernel(modes).clusters(256, c))
