"""Write the report: the page and the figures, as files."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from ... import _atomic
from ..._figures import NARROW, WIDE, png, svg
from . import figure
from .describe import Picture
from .markup import render
from .page import page
from .panels import Panel, arrange
from .runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "report.html"


def write(runs: Sequence[Run], out: Path, damaged: Sequence[str] = ()) -> list[Path]:
    """Report on runs into a folder. Return the page and, after it, each figure as PNG and SVG.

    The page also lists runs that are damaged and left out.
    """
    panels = arrange(runs)
    figures: dict[str, bytes] = {}
    pictures: dict[str, bytes] = {}
    inlined: dict[str, list[Markup]] = {}
    for panel in panels:
        drawn = _figures(panel)
        for one in drawn:
            figures[f"{one.name}.png"] = png(one.wide)
            figures[f"{one.name}.svg"] = svg(one.wide).encode()
            figures[f"{one.name}-narrow.svg"] = svg(one.narrow).encode()
        shown = panel.description.pictures(panel.series)
        for picture in shown:
            pictures[f"{panel.slug}-{picture.name}"] = picture.content
        inlined[panel.slug] = _elements(drawn, shown)
    files = {PAGE: page(panels, inlined, damaged).encode(), **figures, **pictures}
    for name, content in files.items():
        _atomic.write(out / name, content)
    return [out / name for name in files]


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A figure in its two forms, the name of its files, and what it shows in words."""

    name: str
    wide: Figure
    narrow: Figure
    text: str


def _figures(panel: Panel) -> list[_Drawn]:
    """Draw each curve that has a series."""
    return [
        _Drawn(
            f"{panel.slug}-{curve.name}",
            figure.draw(panel, curve, WIDE),
            figure.draw(panel, curve, NARROW),
            f"{panel.title}: {curve.label} over {curve.along_label}",
        )
        for curve in panel.description.curves
        if panel.drawn(curve)
    ]


def _elements(figures: Sequence[_Drawn], pictures: Sequence[Picture]) -> list[Markup]:
    drawn = []
    for one in figures:
        wide = figure.inline(one.wide, one.name, one.text, "wide")
        narrow = figure.inline(one.narrow, f"{one.name}-narrow", one.text, "narrow")
        drawn.append(wide + narrow)
    return [*drawn, *map(_image, pictures)]


def _image(picture: Picture) -> Markup:
    kind = picture.name.rpartition(".")[2]
    data = base64.b64encode(picture.content).decode()
    return render("image.html", kind=kind, data=data, text=picture.text)
