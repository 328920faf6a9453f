"""What is timed, against which peers, on which sizes. Nothing in the library imports it.

This file names the benchmarks without loading torch; each has a module of its name with ``entries(size)``, what is timed
at a size, and ``baseline(size)``, the entry that the others are compared with.
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
        nonlinearities: those it runs by default, if it times recurrences; else empty.
    """

    name: str
    about: str
    forms: tuple[str, ...]
    sizes: str
    quick: str
    gpu: str = ""
    nonlinearities: str = ""


BENCHES = {
    bench.name: bench
    for bench in (
        Bench("matrix", "Forming an orthogonal matrix.", ("N", "NxM"), "64,128,256,512,1024,4096x64", "64,256,512"),
        Bench(
            "multiply",
            "Multiplying a batch of vectors by an orthogonal matrix.",
            ("NxLxB",),
            "256x32x128,1024x64x128,4096x64x128",
            "256x32x128,512x32x128,1024x32x128",
        ),
        Bench(
            "rnn",
            "Running an orthogonal recurrence over time.",
            ("NxBxT", "NxLxBxT"),
            "190x128x200,1024x128x64x20",
            "190x32x50,256x32x32x20",
            gpu="128x128x512,190x128x512,224x128x512,256x128x512,512x128x512,1024x64x512,1024x128x64x512",
            nonlinearities="modrelu,relu",
        ),
    )
}
"""Every benchmark by its name."""
