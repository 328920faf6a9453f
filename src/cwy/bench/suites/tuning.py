"""Times around the tuned constants of ``wy``: the record that its table of tiers names.

On an H200, ``python -m cwy.bench.suites.tuning results/bench/h200/tuning.txt`` writes it.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import _atomic, ops
from ...cudagraph import CapturedCall
from ...ops.wy import blocked, cooperative, cuda, fused, split_fp16, tiers
from ..harness.check import alike
from ..harness.timing import Effort, Timer, in_turn
from ..output.rows import caption, context
from . import Size, show_size

EFFORT = Effort(repeats=15, shortest=0.004, budget=0.3, limit=5.0)
SEED = 0
DERIVED = (cooperative, fused, blocked, split_fp16, cuda)
"""The modules that derive macros and launches from the constants, in the order of their imports."""


@dataclass(frozen=True)
class Study:
    """Describe one constant, and what is timed with other values of it.

    Attributes:
        constant: its name in ``tiers.py``.
        values: the values that are tried, among them its own.
        what: the name of the call, one of :data:`CALLS`.
        sizes: (N, L) of the vectors.
        backward: whether the gradient is timed too.
    """

    constant: str
    values: tuple[int, ...]
    what: str
    sizes: tuple[Size, ...]
    backward: bool = False


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "cwy_matrix": lambda v: ops.cwy_matrix(v, backend="cuda"),
    "tcwy_matrix": lambda v: ops.tcwy_matrix(v, backend="cuda"),
    "wy_factors": lambda v: tuple(ops.wy_factors(v, backend="cuda")),
    "normalize": lambda v: blocked.normalize(v, True),
    "split": lambda v: split_fp16.split(
        v, split_fp16.TO_1, split_fp16.LEFT, kind=split_fp16.Kind.SKEW
    ),
}
STUDIES = (
    Study("SPLIT_THIN_ROWS", (2048, 4096, 8192), "cwy_matrix", ((3072, 128), (4096, 128))),
    Study("RESIDENT", (1, 2, 3), "cwy_matrix", ((512, 512),), backward=True),
    Study("COLUMNS", (4, 8, 16), "cwy_matrix", ((512, 512),), backward=True),
    Study("AHEAD", (2, 4, 8), "wy_factors", ((512, 512),)),
    Study("LONG_ROWS", (256, 512, 1024), "tcwy_matrix", ((512, 64), (1024, 64)), backward=True),
    Study("PART_ROWS", (64, 128, 256), "tcwy_matrix", ((4096, 64),), backward=True),
    Study("PRODUCT_PART_ROWS", (128, 256, 512), "tcwy_matrix", ((4096, 128),), backward=True),
    Study("INVERTED_BLOCK", (256, 512), "wy_factors", ((1024, 1024), (2048, 2048))),
    Study("GRAM_STRIP", (512, 1024, 2048), "wy_factors", ((2048, 2048), (4096, 4096))),
    Study("CUT_INVERSE", (1024, 2048, 4096), "wy_factors", ((4096, 4096),)),
    Study("COLUMN_THREADS", (256, 512, 1024), "normalize", ((1024, 1024), (4096, 4096))),
    Study("COLUMN_WIDTH", (8, 16, 32), "normalize", ((1024, 1024), (4096, 4096))),
    Study("SPLIT_TILE", (32, 64), "split", ((4096, 4096),)),
    Study("SPLIT_TILE_ROWS", (8, 16, 32), "split", ((4096, 4096),)),
)


@contextmanager
def changed(constant: str, value: int) -> Iterator[None]:
    """Give a constant another value, in every module that reads it."""
    own = getattr(tiers, constant)
    try:
        _set(constant, value)
        yield
    finally:
        _set(constant, own)


def _set(constant: str, value: int) -> None:
    setattr(tiers, constant, value)
    for module in DERIVED:
        importlib.reload(module)


def measure(study: Study, size: Size, device: torch.device) -> Iterator[str]:
    """Time one size with each value, all in turn, and yield a line for each."""
    generator = torch.Generator(device).manual_seed(SEED)
    # Small numbers: fp16 must hold what "split" splits.
    v = torch.randn(*size, generator=generator, device=device).div_(16).requires_grad_()
    own = getattr(tiers, study.constant)
    graphs: dict[int, list[CapturedCall]] = {}
    failed: dict[int, str] = {}
    for value in study.values:
        try:
            with changed(study.constant, value):
                graphs[value] = _captured(study, v)
        except RuntimeError as error:
            if value == own:
                raise
            failed[value] = str(error).strip().partition("\n")[0]
    _refuse_wrong(graphs, failed, own)
    timers = {
        value: [Timer(graph.replay, device) for graph in made] for value, made in graphs.items()
    }
    every = [timer for made in timers.values() for timer in made]
    for timer in every:
        timer.calibrate(EFFORT)
    for _ in in_turn(every):
        pass
    for value in study.values:
        yield _line(study, size, value, failed.get(value) or _medians(timers[value]))


def _captured(study: Study, v: Tensor) -> list[CapturedCall]:
    """Capture the call and, if it is wanted, the call with its gradient."""
    call = CALLS[study.what]

    def forward() -> Any:
        with torch.no_grad():
            return call(v)

    captured = [CapturedCall(forward)]
    if study.backward:
        z = torch.cos(torch.arange(captured[0].outputs.numel(), device=v.device))
        z = z.view_as(captured[0].outputs)
        captured.append(CapturedCall(lambda: torch.autograd.grad(call(v), v, z)))
    for graph in captured:
        graph.replay()
    return captured


def _refuse_wrong(graphs: dict[int, list[CapturedCall]], failed: dict[int, str], own: int) -> None:
    """Move the values whose results differ from those of the constant's own to ``failed``."""
    for value in list(graphs):
        pairs = zip(graphs[value], graphs[own], strict=True)
        if not all(alike(ours.outputs, right.outputs, torch.float32) for ours, right in pairs):
            failed[value] = "its result is another"
            del graphs[value]


def _medians(timers: list[Timer]) -> str:
    return " / ".join(f"{timer.quartiles()[1] * 1e3:.4f}" for timer in timers)


def _line(study: Study, size: Size, value: int, found: str) -> str:
    shown = str(value)
    if value == getattr(tiers, study.constant):
        shown = f"*{value}"
    return f"{study.constant:18}{study.what:12}{show_size(size):>10}{shown:>7}  {found}"


def record(device: torch.device) -> Iterator[str]:
    """Yield the lines of the record."""
    command = shlex.join(["python", "-m", "cwy.bench.suites.tuning", *sys.argv[1:]])
    yield (
        "ms of a call replayed as a CUDA graph, forward or forward / forward + backward: medians "
        f"of up to {EFFORT.repeats} samples, taken in turn."
    )
    yield "One constant of src/cwy/ops/wy/tiers.py is changed at a time. * marks its own value."
    yield caption(context(device, SEED), "float32")
    yield f"{command}\n"
    for study in STUDIES:
        for size in study.sizes:
            yield from measure(study, size, device)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("cwy.bench.suites.tuning: the constants are of kernels, which need a GPU.")
    lines = []
    for line in record(torch.device("cuda", torch.cuda.current_device())):
        print(line, flush=True)
        lines.append(line)
    _atomic.write(Path(sys.argv[1]), "\n".join([*lines, ""]).encode())


if __name__ == "__main__":
    main()
