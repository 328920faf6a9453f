"""Times around the tuned constants of ``wy``: the record that its table of tiers names.

On an H200, ``python -m cwy.bench.suites.tuning results/bench/h200/tuning.txt`` writes it.
"""

from __future__ import annotations

import importlib
import itertools
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ... import _atomic, ops
from ...cudagraph import CapturedCall
from ...ops._linalg import double
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
        sizes: (N, L) of the vectors, or (B, N, L) of a batch.
        backward: whether the gradient is timed too.
        plain: whether plain calls are timed too, for a constant that only ``tiers.choose`` reads.
        errors: whether errors are measured too, for values that cost accuracy.
    """

    constant: str
    values: tuple[int, ...]
    what: str
    sizes: tuple[Size, ...]
    backward: bool = False
    plain: bool = False
    errors: bool = False


# The functions of the backend, so that nothing in between remembers another value.
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "cwy_matrix": lambda v: cuda.cwy_matrix(v),
    "tcwy_matrix": lambda v: cuda.tcwy_matrix(v),
    "wy_factors": lambda v: cuda.wy_factors(v),
    "normalize": lambda v: blocked.normalize(v, True),
    "split": lambda v: split_fp16.split(
        v, split_fp16.TO_1, split_fp16.LEFT, kind=split_fp16.Kind.SKEW
    ),
}
REFERENCES: dict[str, Callable[[Tensor], Any]] = {
    "cwy_matrix": lambda v: ops.cwy_matrix(v, backend="analytic"),
}
"""What errors are measured against, in float64, and compared with, in float32."""
STUDIES = (
    Study(
        "ONE_LAUNCH_SIDE",
        (256, 512, 768),
        "cwy_matrix",
        ((384, 384), (512, 512), (768, 512)),
        backward=True,
        plain=True,
    ),
    Study(
        "SPLIT_THIN_ROWS",
        (1024, 2048, 4096),
        "cwy_matrix",
        ((1536, 256), (2048, 256), (2560, 64), (2560, 256), (3072, 128)),
        backward=True,
        plain=True,
        errors=True,
    ),
    Study("SPLIT_THIN_ROWS", (4096, 8192), "cwy_matrix", ((4096, 128),), plain=True, errors=True),
    Study(
        "RESIDENT",
        (1, 2, 3),
        "cwy_matrix",
        (
            (128, 128),
            (256, 256),
            (384, 384),
            (512, 512),
            (1024, 1024),
            (64, 128, 128),
            (16, 256, 256),
        ),
        backward=True,
    ),
    Study("COLUMNS", (4, 8, 16), "cwy_matrix", ((512, 512),), backward=True),
    Study(
        "COLUMNS_MANY", (16, 32, 64), "cwy_matrix", ((64, 128, 128), (16, 256, 256)), backward=True
    ),
    Study("AHEAD", (2, 4, 8), "wy_factors", ((512, 512),)),
    # Their launches have 64, 121 and 256 blocks.
    Study(
        "WATCHED_BLOCKS",
        (32, 128, 256),
        "cwy_matrix",
        ((256, 256), (352, 352), (512, 512)),
        backward=True,
    ),
    Study("LONG_ROWS", (256, 512, 1024), "tcwy_matrix", ((512, 64), (1024, 64)), backward=True),
    Study("PART_ROWS", (64, 128, 256), "tcwy_matrix", ((4096, 64),), backward=True),
    Study("PRODUCT_PART_ROWS", (128, 256, 512), "tcwy_matrix", ((4096, 128),), backward=True),
    Study("INVERTED_BLOCK", (256, 512), "wy_factors", ((1024, 1024), (2048, 2048))),
    Study("GRAM_STRIP", (512, 1024, 2048), "wy_factors", ((2048, 2048), (4096, 4096))),
    Study("CUT_INVERSE", (1024, 2048, 4096), "wy_factors", ((4096, 4096),)),
    Study("COLUMN_THREADS", (256, 512, 1024), "normalize", ((1024, 1024), (4096, 4096))),
    Study("COLUMN_WIDTH", (8, 16, 32), "normalize", ((1024, 1024), (4096, 4096))),
    Study(
        "SPLIT_TERMS",
        (256, 512, 1024),
        "cwy_matrix",
        ((4096, 1024), (2048, 2048)),
        backward=True,
        errors=True,
    ),
    Study(
        "SPLIT_PIECES",
        (6, 12, 24),
        "cwy_matrix",
        ((2048, 2048), (4096, 4096)),
        backward=True,
        errors=True,
    ),
    Study("SPLIT_TILE", (32, 64), "split", ((4096, 4096),)),
    Study("SPLIT_TILE_ROWS", (8, 16, 32), "split", ((4096, 4096),)),
)


@contextmanager
def changed(constant: str, value: int, derived: Sequence[ModuleType] = DERIVED) -> Iterator[None]:
    """Give a constant another value, in every module that reads it.

    Args:
        constant: its name.
        value: its value.
        derived: the modules to reload.
    """
    own = getattr(tiers, constant)
    try:
        _set(constant, value, derived)
        yield
    finally:
        _set(constant, own, derived)


def _set(constant: str, value: int, derived: Sequence[ModuleType]) -> None:
    setattr(tiers, constant, value)
    for module in derived:
        importlib.reload(module)


def measure(study: Study, size: Size, device: torch.device) -> Iterator[str]:
    """Time one size with each value, all in turn, and yield a line for each."""
    generator = torch.Generator(device).manual_seed(SEED)
    # Small numbers: fp16 must hold what "split" splits.
    v = torch.randn(*size, generator=generator, device=device).div_(16)
    calls = calls_of(CALLS[study.what], v, study.backward)
    graphs, failed = _captured(study, calls)
    _refuse_wrong(graphs, failed, getattr(tiers, study.constant))
    found = {value: [_medians(timers)] for value, timers in _replayed(graphs, device).items()}
    if study.plain:
        for value, timers in _called(study, calls, list(graphs), device).items():
            found[value].append(f"plain {_medians(timers)}")
    if study.errors:
        truth = results(REFERENCES[study.what], v.double(), study.backward)
        usual = errors(results(REFERENCES[study.what], v, study.backward), truth)
        for value, captured in graphs.items():
            ours = errors([graph.outputs for graph in captured], truth)
            found[value].append(f"errors {ours} ({usual})")
    for value in study.values:
        yield _line(study, size, value, failed.get(value) or "  ".join(found[value]))


def calls_of(call: Callable[[Tensor], Any], v: Tensor, backward: bool) -> list[Callable[[], Any]]:
    """Return the call without its argument and, if it is wanted, the call with its gradient."""
    v = v.detach().requires_grad_()

    def forward() -> Any:
        with torch.no_grad():
            return call(v)

    if not backward:
        return [forward]
    out = forward()
    z = torch.cos(torch.arange(out.numel(), device=v.device)).view_as(out).to(v.dtype)
    return [forward, lambda: torch.autograd.grad(call(v), v, z)]


def results(call: Callable[[Tensor], Any], v: Tensor, backward: bool) -> list[Any]:
    """Return the result and, if it is wanted, the gradient."""
    return [one() for one in calls_of(call, v, backward)]


def errors(found: Sequence[Any], truth: Sequence[Any]) -> str:
    """Return the largest errors of a result and its gradient, relative to the largest entries."""
    shown = []
    for ours, true in zip(found, truth, strict=True):
        if not isinstance(true, Tensor):
            (ours,) = ours
            (true,) = true
        shown.append(f"{(double(ours) - true).abs().max() / true.abs().max():.1e}")
    return " / ".join(shown)


def _captured(
    study: Study, calls: list[Callable[[], Any]]
) -> tuple[dict[int, list[CapturedCall]], dict[int, str]]:
    """Capture the calls with each value, or keep the reason why that is not possible."""
    graphs = {}
    failed = {}
    for value in study.values:
        try:
            with changed(study.constant, value):
                graphs[value] = [CapturedCall(call) for call in calls]
        except RuntimeError as error:
            if value == getattr(tiers, study.constant):
                raise
            failed[value] = str(error).strip().partition("\n")[0]
    for graph in itertools.chain.from_iterable(graphs.values()):
        graph.replay()
    return graphs, failed


def _replayed(
    graphs: dict[int, list[CapturedCall]], device: torch.device
) -> dict[int, list[Timer]]:
    """Time the graphs in turn."""
    timers = {
        value: [Timer(graph.replay, device) for graph in made] for value, made in graphs.items()
    }
    every = [timer for made in timers.values() for timer in made]
    for timer in every:
        timer.calibrate(EFFORT)
    for _ in in_turn(every):
        pass
    return timers


def _called(
    study: Study, calls: list[Callable[[], Any]], values: list[int], device: torch.device
) -> dict[int, list[Timer]]:
    """Time plain calls with the values in turn."""
    timers = {value: [Timer(call, device) for call in calls] for value in values}
    for turn, value in itertools.product(range(EFFORT.repeats), values):
        with changed(study.constant, value, derived=()):
            for timer in timers[value]:
                if turn == 0:
                    timer.call()  # it compiles
                    timer.calibrate(EFFORT)
                timer.sample()
    return timers


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
    return f"{study.constant:18}{study.what:12}{show_size(size):>12}{shown:>7}  {found}"


def record(device: torch.device) -> Iterator[str]:
    """Yield the lines of the record."""
    command = shlex.join(["python", "-m", "cwy.bench.suites.tuning", *sys.argv[1:]])
    yield (
        "ms of a call replayed as a CUDA graph, forward or forward / forward + backward: medians "
        f"of up to {EFFORT.repeats} samples, taken in turn."
    )
    yield "plain: ms of plain calls, also medians."
    yield (
        "errors: the largest ones of the result and its gradient against float64, as shares of "
        "the largest entry, next to (those of float32 operations)."
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
    text = ""
    for line in record(torch.device("cuda", torch.cuda.current_device())):
        print(line, flush=True)
        text += f"{line}\n"
        # What was measured stays if the rest is cut off.
        _atomic.write(Path(sys.argv[1]), text.encode())


if __name__ == "__main__":
    main()
