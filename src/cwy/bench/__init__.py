"""Time every method and its peers. Nothing in the library imports this package.

Three rooms: ``harness`` (how things are timed), ``suites`` (what is timed) and ``output`` (rows,
tables, figures and pages). ``cli`` takes the options, ``runner`` runs a benchmark and shows it,
and ``advise`` answers which method is fastest for one size.
"""

from __future__ import annotations

from .suites import BENCHES, Bench, Size, parse_sizes

__all__ = ["BENCHES", "Bench", "Size", "parse_sizes"]
