"""What the docs build calls: numbers of records, methods, maths, reports and benchmarks."""

import html
import logging
import re
from pathlib import Path

import commands
import math_font
import record_numbers
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

import cwy
from cwy.bench.output import pages as benchmarks
from cwy.experiments.report import find_runs, write
from cwy.experiments.report.page import heading, section
from cwy.experiments.report.panels import arrange
from cwy.experiments.report.write import elements

log = logging.getLogger("mkdocs.hooks")
REPORT = r"<!-- report (\w+) -->"
"""What holds the place of a report, which is HTML, until Markdown is done."""
DISPLAYS = {"div": "block", "span": "inline"}
"""How MathML shows a formula, by the element that arithmatex wraps it in."""
FORMER = {"api.md": "api/index.md", "optimisers.md": "optimizers.md"}
"""Pages by their former names. Links to those are redirected."""
RECORDS = record_numbers.RESULTS


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


def report(task: str) -> str:
    """Write what `cwy report` shows of a task's committed runs, and a link to the whole page."""
    runs = find_runs([RECORDS / task], log.warning)
    shown = [f"<h3>{html.escape(heading(p))}</h3>{section(p, elements(p))}" for p in arrange(runs)]
    link = f'<a href="results/{task}/report.html">Every run, with settings and environment</a>'
    whole = f"<p>{link}</p>"
    return f'<div class="report">{"".join(shown)}{whole}</div>'


def on_post_build(config, **_) -> None:
    """Write the whole reports and draw the benchmarks into the site."""
    for task in sorted(path.name for path in RECORDS.iterdir() if (path / "notes.md").exists()):
        out = Path(config["site_dir"]) / "results" / task
        out.mkdir(parents=True, exist_ok=True)
        damaged: list[str] = []
        write(find_runs([RECORDS / task], damaged.append), out, damaged)
    site = Path(config["site_dir"])
    benchmarks.draw(RECORDS / "bench", site)
    math_font.ship(site)
    for former, name in FORMER.items():
        address = name.replace(".md", ".html")
        move = (
            f'<meta http-equiv="refresh" content="0; url={address}"><a href="{address}">Moved</a>'
        )
        (site / former).with_suffix(".html").write_text(f"<!doctype html>{move}")


def mathml(tex: str, display: str) -> str:
    """Convert TeX to MathML, which browsers draw. What cannot be converted fails the build."""
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
        "cli": commands.reference,
        "claims": lambda: benchmarks.claims(rows),
        "methods": methods_table(),
        "report": lambda task: f"<!-- report {task} -->",
    }
    for former, name in FORMER.items():
        markdown = re.sub(rf"\]\(((?:\.\./)*){re.escape(former)}", rf"](\g<1>{name}", markdown)
    return record_numbers.fill(markdown, page.file.src_path, macros)


def on_page_content(content: str, **_) -> str:
    """Fill in the reports, the maths and the references between docstrings."""
    content = re.sub(REPORT, lambda m: report(m[1]), content)
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
