"""The page: one file that needs no other, readable on paper, on a phone, by day and by night."""

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
    """The report as HTML.

    Args:
        panels: what to show.
        figures: of each panel, by its slug, the figures as elements.
        damaged: what could not be read, and why.
    """
    runs = [run for panel in panels for run in panel.runs]
    devices = sorted({str(run.record["device"]) for run in runs if run.record})
    return render(
        "page.html",
        title=heading(panels[0]) if len(panels) == 1 else _title(panels),
        count=len(runs),
        devices=listed(devices) if devices else "",
        damaged=" ".join(damaged),
        running=sum(run.record is None for run in runs),
        panels=panels,
        heading=heading,
        sections={panel.slug: section(panel, figures[panel.slug]) for panel in panels},
        runs=tables.every_run(panels),
        settings=tables.settings(runs),
        environment=tables.environment(runs),
    )


def heading(panel: Panel) -> str:
    """What a panel is, and what it shows."""
    return f"{panel.title}: {panel.finding}"


def section(panel: Panel, figures: Sequence[Markup]) -> Markup:
    """A panel without its heading: what it is about, its table, its figures."""
    several = any(len(one.runs) > 1 for one in panel.series)
    note = "Thick: the mean over seeds; thin: each seed." if several else ""
    about, summary = panel.description.about, tables.summary(panel)
    return render("section.html", about=about, summary=summary, figures=figures, note=note)


def _title(panels: Sequence[Panel]) -> str:
    count = sum(len(panel.runs) for panel in panels)
    return f"What {count} runs of {listed(list(dict.fromkeys(panel.description.title for panel in panels)))} show"
