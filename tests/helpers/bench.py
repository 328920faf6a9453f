"""Benchmarks of sizes that take no time."""

import subprocess
from pathlib import Path

from .cli import COMMAND, run

TINY = {
    "N": "6,8",
    "NxM": "12x3,16x4",
    "NxLxB": "8x3x2,9x3x2",
    "NxDxB": "8x2x2,9x2x2",
    "NxLxDxB": "8x2x2x2,9x2x2x2",
    "NxBxT": "8x2x3,9x2x3",
    "NxLxBxT": "8x2x2x3,8x4x2x3",
}
"""Sizes by the first form of a benchmark."""


def bench(*arguments: str, cwd: Path, name: str = "matrix") -> subprocess.CompletedProcess[str]:
    """Run one benchmark quickly."""
    return run(COMMAND, "bench", name, "--quick", "--threads", "1", *arguments, cwd=cwd)


def tiny_program(before: str = "") -> str:
    """Return a program that is ``cwy`` with TINY sizes. ``before`` is run first."""
    return (
        "from dataclasses import replace; import cwy.bench; from cwy.cli import main\n"
        f"{before}"
        f"tiny = {TINY}\n"
        "for name, bench in cwy.bench.BENCHES.items():\n"
        "    cwy.bench.BENCHES[name] = replace(bench, quick=tiny[bench.forms[0]])\n"
        "main()"
    )
