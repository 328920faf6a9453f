"""Write the report: the page and the figures, as files."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from ... import _atomic
from ..._figures import NARROW, WIDE, png, svg
from . import figure
from .describe import Picture
from .markup import render
from .page import page
from .panels import Panel, arrange
from .runs import Run

PAGE = "report.html"


def write(
    runs: Sequence[Run], out: Path, damaged: Sequence[str] = (), pngs: bool = True
) -> list[Path]:
    """Report on runs into a folder. Return the page and, after it, each figure as PNG and SVG.

    The page also lists runs that are damaged and left out. Without ``pngs``, as for a site, figures
    are SVG in a wide and a narrow form.
    """
    panels = arrange(runs)
    figures: dict[str, bytes] = {}
    pictures: dict[str, bytes] = {}
    inlined: dict[str, list[Markup]] = {}
    for panel in panels:
        drawn = _figures(panel, pngs)
        for one in drawn:
            figures[f"{one.name}.svg"] = one.wide.encode()
            if one.png is None:
                figures[f"{one.name}-narrow.svg"] = one.narrow.encode()
            else:
                figures[f"{one.name}.png"] = one.png
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
    """Hold a figure as SVG in two forms and as PNG, the name of its files, and what it shows."""

    name: str
    text: str
    wide: str
    narrow: str
    png: bytes | None


def _figures(panel: Panel, pngs: bool) -> list[_Drawn]:
    """Draw each curve that has a series."""
    found = []
    for curve in panel.description.curves:
        if not panel.drawn(curve):
            continue
        wide = figure.draw(panel, curve, WIDE)
        picture = None
        if pngs:
            picture = png(wide)
        found.append(
            _Drawn(
                name=f"{panel.slug}-{curve.name}",
                text=f"{panel.title}: {curve.label} over {curve.along_label}",
                wide=svg(wide),
                narrow=svg(figure.draw(panel, curve, NARROW)),
                png=picture,
            )
        )
    return found


def _elements(figures: Sequence[_Drawn], pictures: Sequence[Picture]) -> list[Markup]:
    drawn = []
    for one in figures:
        wide = figure.inline(one.wide, one.name, one.text, "wide")
        narrow = figure.inline(one.narrow, f"{one.name}-narrow", one.text, "narrow")
        drawn.append(wide + narrow)
    images = [_image(picture, folded=place > 0) for place, picture in enumerate(pictures)]
    return [*drawn, *images]


def _image(picture: Picture, folded: bool) -> Markup:
    kind = picture.name.rpartition(".")[2]
    data = base64.b64encode(picture.content).decode()
    return render("image.html", kind=kind, data=data, text=picture.text, folded=folded)
