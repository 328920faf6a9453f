"""Figures as files: their style, and SVG that fits light and dark screens, wide and narrow ones."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

# matplotlib is imported where something is drawn.
if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#3c4451"
"""The color of texts and axes. A dark screen shows them light."""
STYLE: dict[str, Any] = {
    "font.size": 10,
    "legend.fontsize": 10,
    "axes.titlesize": 10.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "cwy",
    "path.simplify_threshold": 0.4,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
    ),
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_COLORS = (
    f"svg {{ --ink: {INK}; }}\n"
    "@media (prefers-color-scheme: dark) { svg { --ink: #d5dbe3; } }\n"
    "text { font-family: system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif; }\n"
)


@dataclass(frozen=True)
class Layout:
    """Describe how large a figure is, in inches, and whether its panes are below each other."""

    width: float
    stacked: bool
    letters: int
    """The letters of a legend that fit side by side."""


WIDE = Layout(8.2, stacked=False, letters=92)
NARROW = Layout(4.1, stacked=True, letters=44)
"""For phones: its texts are as large on a screen of 390 pixels as those of WIDE on 1280."""


def legend_columns(labels: Sequence[str], layout: Layout) -> int:
    """Return how many columns of a legend fit. The sample of a line takes seven letters."""
    import numpy as np

    for columns in range(min(4, len(labels)), 1, -1):
        parts = np.array_split(np.array(labels), columns)
        if sum(7 + max(map(len, part)) for part in parts) <= layout.letters:
            return columns
    return 1


def png(figure: Figure) -> bytes:
    """Return a figure as a PNG."""
    return _save(figure, "png", dpi=160, metadata={"Software": None})


def svg(figure: Figure) -> str:
    """Return a figure as an SVG that is the same each time and follows the screen's colors.

    The figure becomes transparent.
    """
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    drawn = _save(figure, "svg", metadata={"Date": None, "Creator": None}).decode()
    drawn = drawn[drawn.index("<svg") :].replace(INK, "var(--ink)")
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", drawn)
    drawn = re.sub(r' transform="rotate\(-0 [^"]*"', "", drawn)
    # A tenth of a point is finer than most screens.
    drawn = re.sub(r' (?:d|x|y|points)="[^"]*"', _rounded, drawn)
    opened = re.match(r"<svg[^>]*>", drawn)
    assert opened
    return f"{opened[0]}\n<style>{_COLORS}</style>{drawn[opened.end() :]}"


def _rounded(attribute: re.Match[str]) -> str:
    return re.sub(r"(\.\d)\d+", r"\1", attribute[0])


def _save(figure: Figure, kind: str, **options: Any) -> bytes:
    from matplotlib import rc_context

    content = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(content, format=kind, **options)
    # The layout stays as it is when the figure is saved in another format.
    figure.set_layout_engine("none")
    return content.getvalue()
