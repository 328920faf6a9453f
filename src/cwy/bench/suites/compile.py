"""Time the first call of a recurrence's kernels: compiled, from the disk, and warm."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ... import __version__, ops
from ...ops import _nvrtc
from ...ops.recurrence import cuda, product, tiling
from ..harness.entry import gaussian
from ..output.rows import Context, Measurement, Time
from . import Size, show_size
from .rnn import lengths, rollout

KINDS = ("compiled", "from_disk", "warm")
"""The kinds of time: nothing was compiled, cubins are on disk, and the call is warm."""


def measure(sizes: list[Size], where: Context) -> Iterator[Measurement]:
    """Time a first call forward and backward at each size, with a cache of its own.

    Sizes have the form NxBxT or NxLxBxT. The device is an NVIDIA GPU.
    """
    device = torch.device(where.device)
    for size in sizes:
        call = _call(size, device)
        times = {}
        with _empty_cache():
            for kind in KINDS:
                if kind != "warm":
                    _forget()
                times[kind] = Time(_clock(call, device), repeats=1)
        yield Measurement(
            bench="compile",
            entry="rollout",
            group="ours",
            about="a first call forward and backward: compiled, from the disk, and when warm",
            size=show_size(size),
            dtype="float32",
            package=f"cwy {__version__}",
            status="ok",
            context=where,
            times=times,
        )


def _forget() -> None:
    """Drop every kernel that this process has loaded."""
    for kept in (_nvrtc.launch.loaded, cuda._prepared, product._tiling, tiling.clusters):
        kept.cache_clear()


def _clock(call: Callable[[], None], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _call(size: Size, device: torch.device) -> Callable[[], None]:
    given = lengths(size)
    n = given.units
    like = {"dtype": torch.float32, "device": device}
    x = gaussian(given.steps, given.batch, n, **like).requires_grad_()
    h0 = gaussian(given.batch, n, **like)
    bias = gaussian(n, **like)
    # Made on the CPU: forming Q compiles kernels of its own.
    v = torch.randn(n, given.reflections or n)
    if given.reflections is None:
        transition = ops.cwy_matrix(v).to(device)
    else:
        transition = ops.WY(*(part.to(device) for part in ops.wy_factors(v)))

    def call() -> None:
        states = rollout(x, h0, transition, bias, "modrelu", "cuda")
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
            if before is None:
                del os.environ["CWY_CACHE"]
            else:
                os.environ["CWY_CACHE"] = before
