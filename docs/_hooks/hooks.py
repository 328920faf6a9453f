"""Serve the docs build: numbers of records, methods, maths, reports and benchmarks."""

import html
import logging
import re
from pathlib import Path

import commands
import math_font
import record_numbers
import record_values
import translation_figures
from latex2mathml.converter import convert
from markupsafe import Markup
from mkdocs.exceptions import PluginError

import cwy
from cwy.bench.output import pages as benchmarks
from cwy.experiments.report import find_runs, write
from cwy.experiments.report.page import heading, section
from cwy.experiments.report.panels import arrange

log = logging.getLogger("mkdocs.hooks")
REPORT = r"<!-- report (\w+) -->"
"""What holds the place of a report, which is HTML, until Markdown is done."""
DISPLAYS = {"div": "block", "span": "inline"}
"""How MathML shows a formula, by the element that arithmatex wraps it in."""
FORMER = {"api.md": "api/index.md", "optimisers.md": "optimizers.md"}
"""Pages by their former names. Links to those are redirected."""
LARGEST = 1_500_000
"""The most bytes of a page."""
RECORDS = record_values.RESULTS


def methods_table() -> str:
    """Write the registered methods as a table. A class that the API page lacks fails the build."""
    rows = [
        "| method | covers | weights | complex | what it does | from |",
        "|---|---|---|---|---|---|",
    ]
    for m in cwy.METHODS.values():
        name = f"[`{m.name}`][cwy.parametrizations.{m.build.__name__}]"
        domain = re.sub(r"_(\w)", r"<sub>\1</sub>", m.domain)
        numbers = "no"
        if m.complex and m.real:
            numbers = "yes"
        elif m.complex:
            numbers = "only"
        rows.append(f"| {name} | {domain} | {m.kind} | {numbers} | {m.about} | {m.paper} |")
    return "\n".join(rows)


def folded(title: str, content: Markup) -> Markup:
    """Fold a part of a page below its title."""
    return Markup("<details><summary>{}</summary>{}</details>").format(title, content)


def report(task: str, home: str) -> str:
    """Write what `cwy report` shows of a task's committed runs, and a link to the whole page.

    The figures are files of the folder ``home``. The first figure and the first picture are open,
    and the others fold.
    """
    parts = []
    panels = arrange(find_runs([RECORDS / task], log.warning))
    for panel in sorted(panels, key=lambda panel: -len(panel.runs)):
        shown = []
        for curve in panel.description.curves:
            if panel.drawn(curve):
                path = f"{home}/{panel.slug}-{curve.name}.svg"
                image = Markup(benchmarks.figure(path, curve.label))  # noqa: S704
                if shown:
                    image = folded(f"Figure: {curve.label}", image)
                shown.append(image)
        for place, picture in enumerate(panel.description.pictures(panel.series)):
            path = f"{home}/{panel.slug}-{picture.name}"
            link = Markup('<a class="figure frames" href="{0}"><img src="{0}" alt="{1}"></a>')
            frames = link.format(path, picture.text)
            if place > 0:
                frames = folded(picture.text, frames)
            shown.append(frames)
        parts.append(f'<h2 id="{panel.slug}">{html.escape(heading(panel))}</h2>')
        parts.append(section(panel, shown, described=not parts[1:]))
    link = f'<a href="{home}/report.html">Every run, with settings and environment</a>'
    return f'<div class="report">{"".join(parts)}<p>{link}</p></div>'


def finding(task: str) -> str:
    """Return the sentence that a report has on a task of one panel."""
    (panel,) = arrange(find_runs([RECORDS / task]))
    return panel.finding


def on_post_build(config, **_) -> None:
    """Write the whole reports, and draw the benchmarks and translation, into the site."""
    for task in sorted(path.name for path in RECORDS.iterdir() if (path / "notes.md").exists()):
        out = Path(config["site_dir"]) / "results" / task
        out.mkdir(parents=True, exist_ok=True)
        damaged: list[str] = []
        write(find_runs([RECORDS / task], damaged.append), out, damaged, pngs=False)
    site = Path(config["site_dir"])
    benchmarks.draw(RECORDS / "bench", site)
    translation_figures.draw(site / "results" / "nmt")
    math_font.ship(site)
    for former, name in FORMER.items():
        address = name.replace(".md", ".html")
        move = f'<meta http-equiv="refresh" content="0; url={address}">'
        text = f'<!doctype html>{move}<a href="{address}">Moved</a>'
        (site / former).with_suffix(".html").write_text(text)
    _check_api(site)
    for page in site.rglob("*.html"):
        if page.stat().st_size > LARGEST:
            raise PluginError(f"{page.relative_to(site)} is larger than {LARGEST} bytes.")


def _check_api(site: Path) -> None:
    """Raise unless every public name has a place on an API page, and no formula is left as TeX."""
    pages = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    if "$$" in pages:
        raise PluginError(f"an API page has TeX: {pages[pages.index('$$') :][:80]}")
    for part in (cwy.nn, cwy.ops, cwy.optim, cwy.parametrizations, cwy.init, cwy.compat):
        for name in getattr(part, "__all__", ()):
            if name != "METHODS" and f'id="{part.__name__}.{name}"' not in pages:
                raise PluginError(f"no API page shows {part.__name__}.{name}")


def mathml(tex: str, display: str) -> str:
    """Convert TeX to MathML, which browsers draw. Unknown TeX fails the build."""
    result = convert(tex, display=display)
    if "\\" in result or "<mi>&</mi>" in result:
        raise PluginError(f"latex2mathml does not know all of: {tex}")
    # Norms keep one height.
    result = result.replace("<mo>&#x02016;", '<mo stretchy="false">&#x02016;')
    # A minus after "=", "(", "[" or "," is a sign, not a difference.
    before = r"(?:&#x0003D;|&#x00028;|&#x0005B;|&#x0002C;)</mo>"
    return re.sub(rf"({before})<mo>(?=&#x02212;)", r'\1<mo form="prefix">', result)


def on_page_markdown(markdown: str, page, **_) -> str:
    """Fill in the numbers of records, the table of methods, and what the benchmarks measured."""
    rows = RECORDS / "bench"
    macros = {
        "bench": lambda name: benchmarks.section(rows, name),
        "figure": benchmarks.figure,
        "finding": finding,
        "verdict": benchmarks.verdict,
        "verdicts": lambda: benchmarks.summary(rows),
        "cli": commands.reference,
        "cli_group": commands.group,
        "claims": lambda: benchmarks.claims(rows),
        "methods": methods_table(),
        "report": lambda task: f"<!-- report {task} -->",
    }
    for former, name in FORMER.items():
        markdown = re.sub(rf"\]\(((?:\.\./)*){re.escape(former)}", rf"](\g<1>{name}", markdown)
    try:
        return record_numbers.fill(markdown, page.file.src_path, macros)
    except record_values.NumberError as error:
        raise PluginError(str(error)) from error


def on_page_content(content: str, **_) -> str:
    """Fill in the reports, the maths and the references between docstrings."""
    content = re.sub(REPORT, lambda m: report(m[1], m[1]), content)
    content = re.sub(
        r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>',
        lambda m: mathml(html.unescape(m[2]).strip(), DISPLAYS[m[1]]),
        content,
        flags=re.DOTALL,
    )
    # Docstrings refer to each other as :func:`~cwy.ops.cwy_matrix`.
    here = {i.rpartition(".")[2]: i for i in re.findall(r'id="(cwy\.[\w.]+)"', content)}

    def reference(m: re.Match) -> str:
        name = m[1].removeprefix("~")
        shown = f"<code>{name}</code>"
        if m[1].startswith("~"):
            shown = f"<code>{name.rpartition('.')[2]}</code>"
        if not name.startswith("cwy."):
            name = here.get(name, "")
        if not name:
            return shown
        return f'<autoref identifier="{name}" optional>{shown}</autoref>'

    return re.sub(r":(?:func|class|meth|data|mod):<code>(~?[\w.]+)</code>", reference, content)
