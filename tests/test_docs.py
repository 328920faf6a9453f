"""What the documentation says is true: its examples run, its table is whole, no public name is
without words.
"""

import importlib
import inspect
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import cwy
from cwy.bench.output import rows, tables
from cwy.experiments.report import find_runs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
API = "".join(page.read_text() for page in sorted((ROOT / "docs/api").glob("*.md")))
PACKAGES = [
    cwy.compat,
    cwy.init,
    cwy.manifolds.stiefel,
    cwy.nn,
    cwy.ops,
    cwy.optim,
    cwy.parametrizations,
    cwy.testing,
]


def _public(module):
    """Names and values that a module defines or exports for its users."""
    names = getattr(module, "__all__", None) or [
        n
        for n, x in vars(module).items()
        if not n.startswith("_") and getattr(x, "__module__", None) == module.__name__
    ]
    return {f"{module.__name__}.{n}": getattr(module, n) for n in names}


PUBLIC = {
    name: x
    for module in [cwy, *PACKAGES]
    for name, x in _public(module).items()
    if callable(x) or inspect.ismodule(x)
}


WITHOUT_TYPED_NUMBERS = [
    "README.md",
    "docs/benchmarks.md",
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs/benchmarks").glob("*.md")),
    "docs/decisions/kernels.md",
    "docs/results.md",
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs/results").glob("*.md")),
]
"""Pages in which every measured number is filled in from a record."""


@pytest.fixture
def numbers(monkeypatch):
    """The module that puts numbers of records into pages."""
    monkeypatch.syspath_prepend(str(ROOT / "docs/_hooks"))
    yield importlib.import_module("record_numbers")
    sys.modules.pop("record_numbers")


@pytest.mark.parametrize("name", WITHOUT_TYPED_NUMBERS)
def test_no_measured_number_of_a_page_is_typed(name, numbers):
    assert not list(numbers.typed_by_hand((ROOT / name).read_text()))


def test_the_numbers_of_readme_are_those_of_the_records(numbers):
    text = (ROOT / "README.md").read_text()
    assert numbers.written(text, "README.md") == text, "Run: make readme"


def test_readme_lists_every_verdict_of_the_results(numbers):
    page = (ROOT / "docs/results.md").read_text()
    listed = [row.strip("| ").split(" | ") for row in numbers.reproduced().splitlines()]
    assert [verdict for _, verdict in listed] == re.findall(r'verdict\("(.*?)"\)', page)
    assert not any("{{" in claim for claim, _ in listed)


def test_a_number_of_a_page_is_that_of_its_record(numbers):
    (found,) = (
        one
        for one in rows.read(ROOT / "results/bench/cpu-2-threads/matrix.csv")
        if (one.entry, one.size) == ("cwy", "1024")
    )
    page = 'It takes {{ ms("cpu-2-threads/matrix", "1024", "cwy") }} ms.'
    assert numbers.fill(page, "page") == f"It takes {tables.ms(found.seconds('both'))} ms."
    block = (
        '<!-- numbers: {{ ms("cpu-2-threads/matrix", "1024", "cwy") }} ms -->1 ms<!-- /numbers -->'
    )
    again = numbers.written(block, "page")
    assert again == block.replace("1 ms<", f"{tables.ms(found.seconds('both'))} ms<")
    assert numbers.written(again, "page") == again


@pytest.mark.parametrize(
    "macro",
    [
        'ms("cpu-2-threads/matrix", "1024", "nobody")',
        'ms("cpu-2-threads/matrix", "1024", "cwy", "both_graph")',
        'ms("nowhere/matrix", "1024", "cwy")',
        'quoted("h200/launch.txt", "nine arguments", "9.5")',
        'runs("mnist/170-nobody-*").last("accuracy") | percent',
        'runs("mnist/170-cwy-seed*").last("accuracy")',
        "unknown()",
    ],
)
def test_a_number_that_no_record_has_is_refused_by_name(macro, numbers):
    page = f"It takes {{{{ {macro} }}}}."
    with pytest.raises(numbers.NumberError, match=re.escape(macro)):
        numbers.fill(page, "page")


def test_numbers_typed_by_hand_are_found(numbers):
    typed = (
        "It takes 12 ms, or 1.5 times as long, at 97%. N = 512, torch 2.11, `lr=0.5`, $x^{0.5}$."
    )
    found = list(numbers.typed_by_hand(typed))
    assert len(found) == 3
    assert not list(numbers.typed_by_hand('It takes {{ ms("a", "b", "c") }} ms at T = 1000.'))


@pytest.mark.gpu
def test_a_recorded_step_trains():
    test_examples_of_a_page_run(ROOT / "docs/gpu.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_of_a_page_run(page):
    torch.manual_seed(0)
    namespace = {"__name__": "page"}
    for block in re.finditer(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        line = page.read_text()[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], page, "exec"), namespace)


def test_table_has_every_method(numbers):
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("latex2mathml")
    table = runpy.run_path(str(ROOT / "docs/_hooks/hooks.py"))["methods_table"]()
    for name, method in cwy.METHODS.items():
        assert f"[`{name}`][cwy.parametrizations.{method.build.__name__}]" in table
        assert method.about
        assert method.about in table
    assert "{{ methods }}" in (ROOT / "docs/methods.md").read_text()


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_documented(name):
    thing = PUBLIC[name]
    doc = inspect.cleandoc(thing.__doc__ or "")
    assert doc, f"{name} has no docstring"
    if inspect.isclass(thing):
        methods = [
            m for m, f in vars(thing).items() if inspect.isfunction(f) and not m.startswith("_")
        ]
        assert all(inspect.getdoc(getattr(thing, m)) for m in methods), (
            f"a method of {name} has no docstring"
        )
    if inspect.isfunction(thing) and thing.__module__.startswith(("cwy.ops", "cwy.api")):
        assert ">>> " in doc, f"{name} has no example"


def test_public_names_are_on_an_api_page():
    shown = re.findall(r"^::: ([\w.]+)$", API, re.MULTILINE)
    for name in PUBLIC:
        assert name in shown or name.rpartition(".")[0] in shown, (
            f"no page under docs/api shows {name}"
        )
    assert "cwy.METHODS" in shown


def test_the_results_pages_show_every_record_and_records_hold_no_more_than_they_should():
    pages = "".join(page.read_text() for page in (ROOT / "docs/results").glob("*.md"))
    shown = re.findall(r'^{{ report\("(\w+)"\) }}$', pages, re.MULTILINE)
    assert set(shown) == {
        folder.name for folder in (ROOT / "results").iterdir() if folder.is_dir()
    } - {"bench"}
    for run in find_runs([ROOT / "results" / task for task in shown]):
        kept = {path.name for path in run.folder.iterdir()} - {"frames.png", "diverged.txt"}
        # A run that was stopped is shown as such.
        assert kept == {"config.json", "metrics.jsonl"} | (
            {"record.json"} if run.status == "finished" else set()
        )
        assert run.record is None or not run.record["dirty"], (
            f"{run.folder.name} belongs to no commit"
        )
