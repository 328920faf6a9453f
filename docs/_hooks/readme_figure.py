"""Draw the figure of README from a committed record, as a small SVG that follows dark mode.

``python docs/_hooks/readme_figure.py`` writes docs/assets/speed.svg again. With ``--check`` it
fails if the file differs from the record.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from record_values import NumberError, seconds

FIGURE = Path(__file__).parents[1] / "assets/speed.svg"
RECORD = "h200/matrix"
SIZES = (64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Curve:
    """Describe one line of the figure: an entry of the record, its label and its style."""

    entry: str
    label: str
    light: str
    dark: str
    dashes: str = ""


CURVES = (
    Curve("cwy", "cwy", "#1f4fd8", "#7aa2ff"),
    Curve("orthogonal(matrix_exp)", "torch matrix_exp", "#b91c1c", "#f87171", "9 3 2 3"),
    Curve("linalg.qr", "QR", "#15803d", "#4ade80", "2 3"),
    Curve("orthogonal(cayley)", "torch cayley", "#b45309", "#fbbf24", "7 3"),
    Curve("matmul", "one matmul", "#57606a", "#9ea7b3", "1 4"),
)

WIDTH = 760
HEIGHT = 320
LEFT = 64
RIGHT = WIDTH - 112
TOP = 36
BOTTOM = HEIGHT - 46
DECADES = (-1, 2)
"""The powers of ten between which the milliseconds lie."""


def points(entry: str) -> list[tuple[int, float]]:
    """Return size and milliseconds, forward and backward, of each size that was measured."""
    found = []
    for size in SIZES:
        try:
            found.append((size, seconds(RECORD, str(size), entry) * 1e3))
        except NumberError:
            continue
    return found


def across(size: float) -> float:
    """Return the position of a size from the left."""
    share = math.log2(size / SIZES[0]) / math.log2(SIZES[-1] / SIZES[0])
    return LEFT + (RIGHT - LEFT) * share


def down(milliseconds: float) -> float:
    """Return the position of a time from the top."""
    low, high = DECADES
    return TOP + (BOTTOM - TOP) * (high - math.log10(milliseconds)) / (high - low)


def style() -> str:
    """Write the colors of both modes."""
    light = "".join(f".c{i}{{--c:{one.light}}}" for i, one in enumerate(CURVES))
    dark = "".join(f".c{i}{{--c:{one.dark}}}" for i, one in enumerate(CURVES))
    return (
        "svg{--ink:#1f2328;--grid:#d1d9e0}"
        f"{light}"
        "@media(prefers-color-scheme:dark){svg{--ink:#e6edf3;--grid:#3d444d}"
        f"{dark}}}"
        "text{font:14px system-ui,sans-serif;fill:var(--ink)}"
        ".grid{stroke:var(--grid)}"
        ".line{fill:none;stroke:var(--c);stroke-width:2.2}"
        "text.name{fill:var(--c);font-weight:600}"
    )


def axes() -> list[str]:
    """Write the grid and the words at its sides."""
    low, high = DECADES
    above = "ms per orthogonal N × N weight, forward + backward"
    parts = [f'<text x="{LEFT}" y="20">{above}</text>']
    for power in range(low, high + 1):
        y = down(10.0**power)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.0f}H{RIGHT}"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 5:.0f}" text-anchor="end">{10.0**power:g}</text>'
        )
    for size in SIZES:
        x = across(size)
        parts.append(f'<text x="{x:.0f}" y="{BOTTOM + 20}" text-anchor="middle">{size}</text>')
    middle = (LEFT + RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">N</text>')
    return parts


def figure() -> str:
    """Return the whole SVG."""
    parts = axes()
    ends = []
    for index, curve in enumerate(CURVES):
        measured = points(curve.entry)
        path = "L".join(f"{across(x):.0f} {down(y):.1f}" for x, y in measured)
        dashes = ""
        if curve.dashes:
            dashes = f' stroke-dasharray="{curve.dashes}"'
        parts.append(f'<path class="line c{index}"{dashes} d="M{path}"/>')
        last = measured[-1]
        ends.append((down(last[1]), across(last[0]), index, curve.label))
    below = 0.0
    for height, right, index, label in sorted(ends):
        # Names must not cover each other.
        below = max(height + 5, below + 17)
        parts.append(
            f'<text class="name c{index}" x="{right + 8:.0f}" y="{below:.0f}">{label}</text>'
        )
    title = "Milliseconds to form an orthogonal matrix and its gradient, against its size"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>{title}</title><style>{style()}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def main() -> None:
    """Write the figure, or check it."""
    drawn = figure()
    if "--check" not in sys.argv:
        FIGURE.write_text(drawn, encoding="utf-8")
    elif FIGURE.read_text(encoding="utf-8") != drawn:
        sys.exit("docs/assets/speed.svg and the record disagree. Run: make readme")


if __name__ == "__main__":
    main()
