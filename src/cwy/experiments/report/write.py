"""``cwy report``: the page and the figures, as files."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from markupsafe import Markup

from ... import _atomic
from . import figure
from .describe import Picture
from .markup import render
from .page import page
from .panels import Panel, arrange
from .runs import Run

PAGE = "report.html"


def write(runs: Sequence[Run], out: Path, damaged: Sequence[str] = ()) -> list[Path]:
    """Reports on runs into a folder; returns the page and, after it, each figure as PNG and SVG.

    The page also says what is damaged, and left out.
    """
    panels = arrange(runs)
    drawn = {panel.slug: _figures(panel) for panel in panels}
    made: dict[str, bytes] = {}
    for name, one, _ in chain.from_iterable(drawn.values()):
        made |= {f"{name}.png": figure.png(one), f"{name}.svg": figure.svg(one).encode()}
    shown = {panel.slug: panel.description.pictures(panel.series) for panel in panels}
    made |= {
        f"{slug}-{one.name}": one.content for slug, pictures in shown.items() for one in pictures
    }
    inlined = {
        slug: [
            *(figure.inline(one, name, text) for name, one, text in figures),
            *map(_image, shown[slug]),
        ]
        for slug, figures in drawn.items()
    }
    made = {PAGE: page(panels, inlined, damaged).encode(), **made}
    for name, content in made.items():
        _atomic.write(out / name, content)
    return [out / name for name in made]


def elements(panel: Panel) -> list[Markup]:
    """A panel's figures and pictures as elements of a page."""
    figures = [figure.inline(drawn, name, text) for name, drawn, text in _figures(panel)]
    return [*figures, *map(_image, panel.description.pictures(panel.series))]


def _figures(panel: Panel) -> list[tuple[str, figure.Figure, str]]:
    """Name, figure and words of each curve that has something to draw."""
    return [
        (
            f"{panel.slug}-{curve.name}",
            figure.draw(panel, curve),
            f"{panel.title}: {curve.label} over {curve.along_label}",
        )
        for curve in panel.description.curves
        if panel.drawn(curve)
    ]


def _image(picture: Picture) -> Markup:
    kind = picture.name.rpartition(".")[2]
    data = base64.b64encode(picture.content).decode()
    return render("image.html", kind=kind, data=data, text=picture.text)
