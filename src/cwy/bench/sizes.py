"""Sizes as the command line takes them: ``512``, ``4096x64``, ``4096x64x128``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

Size = tuple[int, ...]
"""The numbers of a size, in the order of its form; a square matrix is (N,) where that is a form."""

_ONE = re.compile(r"\d+(?:[x×]\d+)*", re.IGNORECASE)


def parse_sizes(text: str, forms: Sequence[str]) -> list[Size]:
    """Sizes separated by commas, each once, the least work first.

    Args:
        text: e.g. "64, 128, 4096x64".
        forms: those allowed, e.g. ("N", "NxM"). No number may be above N but a batch B and steps T.

    Example:
        >>> parse_sizes("4096x64, 64, 128x128", ("N", "NxM"))
        [(64,), (128,), (4096, 64)]
    """
    found = {_parse(one.strip(), forms) for one in text.split(",") if one.strip()}
    if not found:
        raise ValueError(f"--sizes {text!r} names no size. Give {_allowed(forms)}.")
    # A square N stands for N x N; ties in the number of entries go by N.
    return sorted(found, key=lambda size: (len(size), math.prod(size if len(size) > 1 else size * 2), size))


def show(size: Size) -> str:
    """The size as it is written: "4096x64".

    Example:
        >>> show((4096, 64))
        '4096x64'
    """
    return "x".join(map(str, size))


def _parse(one: str, forms: Sequence[str]) -> Size:
    size = tuple(map(int, re.split("[x×]", one, flags=re.IGNORECASE))) if _ONE.fullmatch(one) else ()
    letters = next((form.split("x") for form in forms if form.count("x") == len(size) - 1), None)
    if letters is None or 0 in size:
        raise ValueError(f"--sizes: {one!r} is not a size. Give {_allowed(forms)}, each number at least 1.")
    n = size[letters.index("N")]
    for letter, value in zip(letters, size, strict=True):
        if letter not in "BT" and value > n:
            raise ValueError(f"--sizes: in {one!r}, {letter} = {value} is above N = {n}. Give {_allowed(forms)}.")
    return size[:1] if "N" in forms and letters == ["N", "M"] and size[0] == size[1] else size


def _allowed(forms: Sequence[str]) -> str:
    examples = {
        "N": "512",
        "NxM": "4096x64",
        "BxNxM": "64x128x128",
        "NxLxB": "4096x64x128",
        "NxBxT": "190x128x200",
        "NxLxBxT": "1024x128x64x20",
    }
    return " or ".join(f"{form} (e.g. {examples[form]})" for form in forms)
