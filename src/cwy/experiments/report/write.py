"""Write the report: the page and the figures, as files."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from ... import _atomic
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
            figures[f"{one.name}.png"] = figure.png(one.figure)
            figures[f"{one.name}.svg"] = figure.svg(one.figure).encode()
        shown = panel.description.pictures(panel.series)
        for picture in shown:
            pictures[f"{panel.slug}-{picture.name}"] = picture.content
        # Drawn into the page last: that changes a figure's colors.
        inlined[panel.slug] = _elements(drawn, shown)
    files = {PAGE: page(panels, inlined, damaged).encode(), **figures, **pictures}
    for name, content in files.items():
        _atomic.write(out / name, content)
    return [out / name for name in files]


def elements(panel: Panel) -> list[Markup]:
    """Return a panel's figures and pictures as elements of a page."""
    return _elements(_figures(panel), panel.description.pictures(panel.series))


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A figure, the name of its files, and what it shows in words."""

    name: str
    figure: Figure
    text: str


def _figures(panel: Panel) -> list[_Drawn]:
    """Draw each curve that has a series."""
    return [
        _Drawn(
            f"{panel.slug}-{curve.name}",
            figure.draw(panel, curve),
            f"{panel.title}: {curve.label} over {curve.along_label}",
        )
        for curve in panel.description.curves
        if panel.drawn(curve)
    ]


def _elements(figures: Sequence[_Drawn], pictures: Sequence[Picture]) -> list[Markup]:
    drawn = [figure.inline(one.figure, one.name, one.text) for one in figures]
    return [*drawn, *map(_image, pictures)]


def _image(picture: Picture) -> Markup:
    kind = picture.name.rpartition(".")[2]
    data = base64.b64encode(picture.content).decode()
    return render("image.html", kind=kind, data=data, text=picture.text)
