"""Name what is timed. This file lists the benchmarks and reads their sizes without loading torch.

A benchmark has one :class:`Bench` here, which the command line shows, and one :class:`Suite`,
which :func:`load` imports when the benchmark runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..harness.entry import Entry

Size = tuple[int, ...]
"""The numbers of a size, in the order of its form. A square matrix is (N,) where N is a form."""

PEERS = ("torch", "geotorch", "geoopt", "torch_householder", "peft", "jax")
"""The packages that entries of group "peer" may need."""
INSTALL = 'pip install "cwy[peers]"'
"""The command that installs them, but for JAX."""


def how_to_install(package: str) -> str:
    """Return the command that installs a package."""
    if package == "jax":
        return 'pip install "cwy[jax]"'
    return INSTALL


@dataclass(frozen=True)
class Bench:
    """Describe a benchmark.

    Attributes:
        name: of its command.
        about: what it times, for the help and the table.
        forms: the sizes it takes, e.g. ("N", "NxM").
        sizes: the default sizes.
        quick: the sizes with ``--quick``.
        gpu: the default sizes on a GPU, where they differ.
        nonlinearities: the default ones, if the benchmark takes several, else empty.
        counts: whether operations are counted.
        between: whether it compares methods of the library. Then the other methods are rivals, too.
        means: whether its picture shows means with standard errors, as the paper's does.
    """

    name: str
    about: str
    forms: tuple[str, ...]
    sizes: str
    quick: str
    gpu: str = ""
    nonlinearities: str = ""
    counts: bool = True
    between: bool = False
    means: bool = False

    @property
    def usual_nonlinearities(self) -> tuple[str, ...]:
        """Return the default nonlinearities, one by one."""
        return tuple(name for name in self.nonlinearities.split(",") if name)


@dataclass(frozen=True)
class Suite:
    """Hold what a benchmark times.

    Attributes:
        entries: ``entries(size)`` lists what is timed at a size.
        baseline: ``baseline(size, device)`` names the entry that the others are compared with.
        formulas: ``formulas(size)`` gives the paper's operation counts by entry, each as a formula
            and as a number. None if the paper has none.
    """

    entries: Callable[[Size], list[Entry]]
    baseline: Callable[[Size, str], str]
    formulas: Callable[[Size], Mapping[str, tuple[str, float]]] | None = None


BENCHES = {
    bench.name: bench
    for bench in (
        Bench(
            "matrix",
            "Forming an orthogonal matrix, or a batch of B.",
            ("N", "NxM", "BxNxM"),
            "64,128,256,512,1024,4096x64",
            "64,256,512",
            gpu="64,128,256,512,1024,2048,4096,4096x64,64x128x128",
        ),
        Bench(
            "multiply",
            "Multiplying a batch of vectors by an orthogonal matrix.",
            ("NxLxB",),
            "256x32x128,1024x64x128,4096x64x128",
            "256x32x128,512x32x128,1024x32x128",
            gpu="256x32x128,1024x64x128,4096x64x128,4096x128x4096",
        ),
        Bench(
            "stiefel",
            "A gradient step over matrices with orthonormal columns (Table 2).",
            ("NxM",),
            "288x32,576x64,1152x128",
            "288x32,576x64,1152x128",
            gpu="1152x128,4096x64,30000x50",
        ),
        Bench(
            "rnn",
            "Running an orthogonal recurrence over time.",
            ("NxBxT", "NxLxBxT"),
            "190x128x200,1024x128x64x20",
            "190x32x50,256x32x32x20",
            gpu="128x128x512,190x128x512,224x128x512,256x128x512,512x128x512,1024x64x512,"
            "1024x128x64x512",
            nonlinearities="modrelu,relu",
            counts=False,
        ),
        Bench(
            "model",
            "A training step of D layers, or of a recurrence of F features, as users run them.",
            ("NxDxB", "NxLxDxB", "NxLxFxBxT"),
            "256x1x64,256x8x64,256x32x8x64,128x128x10x32x100",
            "64x3x32,64x64x10x8x20",
            gpu="256x1x512,256x24x512,1024x12x512,256x32x24x512,32x32x10x32x1020,"
            "190x190x10x128x1020,190x190x128x128x512,512x512x128x128x512,"
            "1024x1024x128x128x512,2048x128x128x64x512",
            counts=False,
        ),
        Bench(
            "adapters",
            "A training step of D frozen layers with adapters of rank L, on B tokens.",
            ("NxLxDxB",),
            "256x8x4x128,512x16x4x256",
            "64x4x2x32",
            gpu="3072x32x8x4096,3072x8x8x4096,4096x32x8x512,1024x32x12x2048",
            counts=False,
        ),
        Bench(
            "jax",
            "A matrix or a recurrence in JAX: cwy.jax, other maps, and the same in torch.",
            ("N", "NxM", "NxBxT"),
            "256,1024,4096x64,190x128x200",
            "64,128",
            gpu="256,1024,4096,4096x64,190x128x1020",
            counts=False,
        ),
        Bench(
            "figure1c",
            "The paper's Figure 1c: CWY, exponential and Cayley map against N.",
            ("N",),
            "64,128,256,512,1024",
            "64,128,256,512",
            gpu="64,128,256,512,1024,2048,4096",
            between=True,
            means=True,
        ),
        Bench(
            "figure2",
            "The paper's Figure 2: a recurrence through L reflections, one at a time (HR) or at "
            "once (CWY).",
            ("NxLxBxT",),
            "1024x16x64x20,1024x32x64x20,1024x64x64x20,1024x128x64x20",
            "256x8x32x20,256x16x32x20,256x32x32x20",
            counts=False,
            between=True,
        ),
        Bench(
            "table1",
            "The paper's Table 1: a recurrence by every method, next to the formulas.",
            ("NxLxBxT",),
            "256x64x16x50,512x64x16x50",
            "128x32x16x20,256x32x16x20",
            gpu="256x64x64x50,512x64x64x50,1024x64x64x50",
            between=True,
        ),
    )
}
"""Every benchmark by its name."""


def load(name: str) -> Suite:
    """Import what a benchmark times. Only this loads torch."""
    from . import adapters, jax, matrix, model, multiply, paper, rnn, stiefel

    suites = {
        "matrix": matrix.SUITE,
        "multiply": multiply.SUITE,
        "stiefel": stiefel.SUITE,
        "rnn": rnn.SUITE,
        "model": model.SUITE,
        "adapters": adapters.SUITE,
        "jax": jax.SUITE,
        "figure1c": paper.FIGURE_1C,
        "figure2": paper.FIGURE_2,
        "table1": paper.TABLE_1,
    }
    return suites[name]


def baseline(bench: Bench, size: Size, device: str, nonlinearities: Sequence[str]) -> str:
    """Name the entry that the others are compared with, with the first nonlinearity if any."""
    kind = device.partition(":")[0]
    name = load(bench.name).baseline(size, kind)
    return ", ".join([name, *nonlinearities[:1]])


_ONE = re.compile(r"\d+(?:[x×]\d+)*", re.IGNORECASE)
_EXAMPLES = {
    "N": "512",
    "NxM": "4096x64",
    "BxNxM": "64x128x128",
    "NxDxB": "256x24x512",
    "NxLxB": "4096x64x128",
    "NxBxT": "190x128x200",
    "NxLxBxT": "1024x128x64x20",
    "NxLxDxB": "256x32x24x512",
    "NxLxFxBxT": "190x190x10x128x1020",
}


def parse_sizes(text: str, forms: Sequence[str]) -> list[Size]:
    """Read sizes separated by commas. Each appears once, the least work first.

    Args:
        text: e.g. "64, 128, 4096x64".
        forms: those allowed, e.g. ("N", "NxM"). Only a batch B and steps T may be above N.

    Example:
        >>> parse_sizes("4096x64, 64, 128x128", ("N", "NxM"))
        [(64,), (128,), (4096, 64)]
    """
    found = {_parse(one.strip(), forms) for one in text.split(",") if one.strip()}
    if not found:
        raise ValueError(f"--sizes {text!r} names no size. Give {_allowed(forms)}.")
    return sorted(found, key=_work)


def show_size(size: Size) -> str:
    """Write a size as the command line takes it.

    Example:
        >>> show_size((4096, 64))
        '4096x64'
    """
    return "x".join(map(str, size))


def _work(size: Size) -> tuple[int, int, Size]:
    """Order sizes by the number of entries. A square N means N x N, and ties go by N."""
    if len(size) == 1:
        return 1, size[0] ** 2, size
    return len(size), math.prod(size), size


def _parse(one: str, forms: Sequence[str]) -> Size:
    size: Size = ()
    if _ONE.fullmatch(one):
        size = tuple(map(int, re.split("[x×]", one, flags=re.IGNORECASE)))
    fitting = [form.split("x") for form in forms if form.count("x") == len(size) - 1]
    if not fitting or 0 in size:
        raise ValueError(
            f"--sizes: {one!r} is not a size. Give {_allowed(forms)}, each number at least 1."
        )
    letters = fitting[0]
    n = size[letters.index("N")]
    for letter, value in zip(letters, size, strict=True):
        if letter not in "BT" and value > n:
            raise ValueError(
                f"--sizes: in {one!r}, {letter} = {value} is above N = {n}. Give {_allowed(forms)}."
            )
    if "N" in forms and letters == ["N", "M"] and size[0] == size[1]:
        return size[:1]
    return size


def _allowed(forms: Sequence[str]) -> str:
    return " or ".join(f"{form} (e.g. {_EXAMPLES[form]})" for form in forms)
