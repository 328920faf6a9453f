"""The page: one file that needs no other, for paper, phones, light and dark screens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from . import tables
from .markup import render
from .panels import Panel
from .words import listed


def page(
    panels: Sequence[Panel], figures: Mapping[str, Sequence[Markup]], damaged: Sequence[str] = ()
) -> str:
    """Return the report as HTML.

    Args:
        panels: what to show.
        figures: the figures of each panel as elements, by its slug.
        damaged: messages about runs that could not be read.
    """
    runs = [run for panel in panels for run in panel.runs]
    devices = sorted({str(run.record["device"]) for run in runs if run.record})
    return render(
        "page.html",
        title=_title(panels),
        count=len(runs),
        devices=listed(devices),
        damaged=" ".join(damaged),
        running=sum(run.record is None for run in runs),
        panels=panels,
        heading=heading,
        sections=_sections(panels, figures),
        runs=tables.every_run(panels),
        settings=tables.settings(runs),
        environment=tables.environment(runs),
    )


def heading(panel: Panel) -> str:
    """Return what a panel is: the task and its sizes."""
    return panel.title


def _sections(
    panels: Sequence[Panel], figures: Mapping[str, Sequence[Markup]]
) -> dict[str, Markup]:
    """Return the sections by slug. The first of each task describes the task."""
    found = {}
    described: set[str] = set()
    for panel in panels:
        first = panel.task not in described
        described.add(panel.task)
        found[panel.slug] = section(panel, figures[panel.slug], first)
    return found


def section(panel: Panel, figures: Sequence[Markup], described: bool = True) -> Markup:
    """Return a panel without its heading: its finding, what it is about, table and figures.

    Only a section that is to be ``described`` explains its task.
    """
    about = ""
    if described:
        about = panel.description.about
    note = ""
    if any(len(one.runs) > 1 for one in panel.series):
        note = (
            "Thick lines with marks are means over seeds. "
            "Thin lines, on wide screens, are single seeds."
        )
    return render(
        "section.html",
        finding=panel.finding,
        about=about,
        summary=tables.summary(panel),
        unnamed=panel.unnamed,
        claims=tables.claims(panel),
        figures=figures,
        note=note,
    )


def _title(panels: Sequence[Panel]) -> str:
    if len(panels) == 1:
        return panels[0].title
    count = sum(len(panel.runs) for panel in panels)
    titles = list(dict.fromkeys(panel.description.title for panel in panels))
    return f"What {count} runs of {listed(titles)} show"
