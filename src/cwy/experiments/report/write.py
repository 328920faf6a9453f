"""``cwy report``: the page and the figures, as files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from . import figure
from .page import page
from .panels import arrange
from .runs import Run

PAGE = "report.html"


def write(runs: Sequence[Run], out: Path) -> list[Path]:
    """Reports on runs into a folder; returns the page and, after it, each figure as PNG and SVG."""
    panels = arrange(runs)
    files: dict[str, bytes] = {}
    elements: dict[str, list[str]] = {}
    for panel in panels:
        elements[panel.slug] = []
        for curve in panel.description.curves:
            if panel.drawn(curve):
                name, drawn = f"{panel.slug}-{curve.name}", figure.draw(panel, curve)
                files[f"{name}.png"], files[f"{name}.svg"] = figure.png(drawn), figure.svg(drawn).encode()
                text = f"{panel.title}: {curve.label} over {curve.along_label}"
                elements[panel.slug].append(figure.inline(drawn, name, text))
    files = {PAGE: page(panels, elements).encode(), **files}
    for name, content in files.items():
        _replace(out / name, content)
    return [out / name for name in files]


def _replace(path: Path, content: bytes) -> None:
    """Writes a file that appears whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
