"""What is timed, against which peers, on which sizes. Nothing in the library imports it.

This file names the benchmarks without loading torch; each has a module of its name with ``entries(size)``, what is timed
at a size, and ``baseline(size, device)``, the entry that the others are compared with; where the paper has formulas for what
an entry costs, also ``paper(size)``.
"""

from __future__ import annotations

from dataclasses import dataclass

from .sizes import Size, parse_sizes

__all__ = ["BENCHES", "Bench", "Size", "parse_sizes"]


@dataclass(frozen=True)
class Bench:
    """A benchmark by name.

    Attributes:
        name: of its command and of its module.
        about: what it times, for the help and the table.
        forms: the sizes it takes, e.g. ("N", "NxM").
        sizes, quick: those it runs by default, and with ``--quick``.
        gpu: those it runs by default on a GPU, where they differ.
        nonlinearities: those it runs by default, if it takes several; else empty.
        counts: whether operations are counted.
        between: whether it compares methods of the library: then the others are rivals, as peers are.
        means: whether its picture shows means and their standard errors, as the paper's does, not medians and quartiles.
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
            gpu="128x128x512,190x128x512,224x128x512,256x128x512,512x128x512,1024x64x512,1024x128x64x512",
            nonlinearities="modrelu,relu",
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
            "The paper's Figure 2: a recurrence through L reflections, one at a time (HR) or at once (CWY).",
            ("NxLxBxT",),
            "1024x16x64x20,1024x32x64x20,1024x64x64x20,1024x128x64x20",
            "256x8x32x20,256x16x32x20,256x32x32x20",
            counts=False,
            between=True,
        ),
        Bench(
            "table1",
            "The paper's Table 1: a recurrence by every method, beside the formulas.",
            ("NxLxBxT",),
            "256x64x16x50,512x64x16x50",
            "128x32x16x20,256x32x16x20",
            gpu="256x64x64x50,512x64x64x50,1024x64x64x50",
            between=True,
        ),
    )
}
"""Every benchmark by its name."""
