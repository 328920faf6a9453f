"""The page: one file that needs no other, readable on paper, on a phone, by day and by night."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from . import tables
from .panels import Panel
from .runs import Run
from .words import listed

TEMPLATE = Path(__file__).with_name("page.html")


def page(panels: Sequence[Panel], figures: dict[str, list[str]], damaged: Sequence[str] = ()) -> str:
    """The report as HTML.

    Args:
        panels: what to show.
        figures: of each panel, by its slug, the figures as SVG elements.
        damaged: what could not be read, and why.
    """
    runs = [run for panel in panels for run in panel.runs]
    alone = len(panels) == 1
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(heading(panels[0]) if alone else _title(panels)),
        lead=_lead(runs, damaged),
        findings="" if alone else _findings(panels),
        panels="\n".join(_panel(panel, figures[panel.slug], alone) for panel in panels),
        runs=tables.every_run(panels),
        settings=tables.settings(runs),
        environment=tables.environment(runs),
    )


def heading(panel: Panel) -> str:
    """What a panel is, and what it shows."""
    return f"{panel.title}: {panel.finding}"


def _title(panels: Sequence[Panel]) -> str:
    count = sum(len(panel.runs) for panel in panels)
    return f"What {count} runs of {listed(list(dict.fromkeys(panel.description.title for panel in panels)))} show"


def _lead(runs: Sequence[Run], damaged: Sequence[str]) -> str:
    running = sum(run.record is None for run in runs)
    devices = sorted({str(run.record["device"]) for run in runs if run.record})
    where = f" on {escape(listed(devices))}" if devices else ""
    unfinished = f" <strong>{running} {'is' if running == 1 else 'are'} not finished.</strong>" if running else ""
    shown = f"; left out: <strong>{escape(' '.join(damaged))}</strong>" if damaged else "; every seed is shown."
    return f"{len(runs)} run{'s' * (len(runs) > 1)}{where}{shown}{unfinished}"


def _findings(panels: Sequence[Panel]) -> str:
    rows = [f'<li><a href="#{escape(p.slug)}">{escape(p.title)}</a>: {escape(p.finding)}.</li>' for p in panels]
    return f'<ul class="findings">{"".join(rows)}</ul>'


def section(panel: Panel, figures: Sequence[str]) -> str:
    """A panel without its heading: what it is about, its table, its figures."""
    note = "Thick: the mean over seeds; thin: each seed." if any(len(one.runs) > 1 for one in panel.series) else ""
    return f"""<p>{escape(panel.description.about)}</p>
{tables.summary(panel)}
{"".join(f"<figure>{figure}</figure>" for figure in figures)}
<p class="note">{note}</p>"""


def _panel(panel: Panel, figures: Sequence[str], alone: bool) -> str:
    title = "" if alone else f"<h2>{escape(heading(panel))}</h2>"
    return f'<section id="{escape(panel.slug)}">{title}{section(panel, figures)}</section>'
