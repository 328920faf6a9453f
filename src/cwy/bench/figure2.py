"""Figure 2: a recurrence through L reflections one after another (HR), and through all of them at once (CWY).

What is timed, and how it is checked, is the benchmark ``rnn``'s, with the nonlinearity of the paper's translation: abs.
"""

from __future__ import annotations

from . import rnn
from .entry import Entry
from .sizes import Size


def baseline(size: Size, device: str) -> str:
    return f"{rnn.baseline(size, device)}, abs"


def entries(size: Size) -> list[Entry]:
    """HR, CWY by each backend, and CWY in a loop of its factors as in the paper."""
    left_out = ("reference", "eager loop of x[t]")
    return [entry for entry in rnn.entries(size) if entry.nonlinearity == "abs" and not entry.name.startswith(left_out)]
