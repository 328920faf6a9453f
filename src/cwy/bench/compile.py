"""What the first call of a recurrence's kernels costs: compiled by NVRTC, and read from the disk."""

from __future__ import annotations

import csv
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .. import ops
from ..ops import nvrtc
from ..ops.recurrence import cuda, product, shapes
from ..terminal import whole
from .entry import gaussian
from .rows import context
from .sizes import Size, show


@dataclass(frozen=True)
class First:
    """Seconds of a first call forward and backward: where nothing was compiled, where cubins are on disk, and when warm."""

    size: str
    compiled: float
    from_disk: float
    warm: float


def measure(sizes: list[Size], device: torch.device) -> Iterator[First]:
    """Times each size (N, B, T or N, L, B, T) with a cache of its own, on an NVIDIA GPU."""
    for size in sizes:
        call = _call(size, device)
        with _empty_cache():
            times = []
            for forget in (True, True, False):
                if forget:
                    for kept in (nvrtc._load, cuda._prepared, product._cut, shapes.clusters):
                        kept.cache_clear()
                torch.cuda.synchronize(device)
                begin = time.perf_counter()
                call()
                torch.cuda.synchronize(device)
                times.append(time.perf_counter() - begin)
        yield First(show(size), *times)


def write(rows: list[First], device: torch.device, path: Path) -> None:
    """The rows as CSV, with device, versions and commit."""
    where = asdict(context(device, 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, [*asdict(rows[0]), *where], quoting=csv.QUOTE_NONNUMERIC)
        table.writeheader()
        table.writerows(asdict(row) | where for row in rows)


def _call(size: Size, device: torch.device):
    n, *count, batch, steps = size
    like = {"dtype": torch.float32, "device": device}
    x, h0 = gaussian(steps, batch, n, **like).requires_grad_(), gaussian(batch, n, **like)
    bias = gaussian(n, **like)
    # Made on the CPU: forming Q compiles kernels of its own.
    v = torch.randn(n, count[0] if count else n)
    q = ops.WY(*(part.to(device) for part in ops.wy_factors(v))) if count else ops.cwy_matrix(v).to(device)

    def call() -> None:
        states, _ = ops.rollout(x, h0, q, bias, backend="cuda")
        assert isinstance(states, torch.Tensor)
        states.backward(x.detach())

    return call


@contextmanager
def _empty_cache() -> Iterator[None]:
    before = os.environ.get("CWY_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CWY_CACHE"] = folder
        try:
            yield
        finally:
            os.environ.pop("CWY_CACHE") if before is None else os.environ.update(CWY_CACHE=before)
