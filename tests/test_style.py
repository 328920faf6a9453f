"""The limits on how much one line, one statement and one signature of the source may hold."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import cwy

ROOT = Path(cwy.__file__).parent
PYTHON = sorted(ROOT.rglob("*.py"))
CUDA = sorted([*ROOT.rglob("*.cu"), *ROOT.rglob("*.cuh")])

CONDITIONALS = 15
"""The most conditional expressions per 1000 lines of code."""
CONDITIONALS_OF_A_FOLDER = 25
POSITIONAL = 8
"""The most positional arguments of a function, with few exceptions."""
EXCEPTIONS = 8
COLUMNS = 100
CUDA_COLUMNS = 120


def read(path):
    return path.read_text(encoding="utf-8")


def is_string(statement):
    """Return whether a statement is only a string, as a docstring is."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return False
    return isinstance(statement.value.value, str)


def code_lines(source):
    """Count the lines that are not blank, not a comment and not part of a docstring."""
    documentation = set()
    for node in ast.walk(ast.parse(source)):
        if is_string(node):
            documentation.update(range(node.lineno, node.end_lineno + 1))
    count = 0
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        if text and not text.startswith("#") and number not in documentation:
            count += 1
    return count


def conditionals(source):
    """Return the lines of conditional expressions, ``a if b else c``."""
    nodes = ast.walk(ast.parse(source))
    return [node.lineno for node in nodes if isinstance(node, ast.IfExp)]


def nested_conditionals(source):
    """Return the lines of conditional expressions that contain another one."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.IfExp):
            inside = [child for child in ast.walk(node) if isinstance(child, ast.IfExp)]
            if len(inside) > 1:
                found.append(node.lineno)
    return found


def crowded_assignments(source):
    """Return the lines that assign three or more values side by side, ``a, b, c = 1, 2, 3``.

    Values that one call returns, as in ``a, b, c = f(x)``, are related and do not count.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign):
            continue
        names, values = node.targets[0], node.value
        side_by_side = isinstance(names, ast.Tuple) and isinstance(values, ast.Tuple)
        if side_by_side and len(values.elts) > 2:
            found.append(node.lineno)
    return found


def crowded_signatures(source):
    """Return the names of functions with more than 8 positional arguments."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if len(node.args.posonlyargs) + len(node.args.args) > POSITIONAL:
            found.append(node.name)
    return found


def long_lines(text, columns):
    """Return the numbers of lines that are longer than so many columns."""
    lines = enumerate(text.splitlines(), 1)
    return [number for number, line in lines if len(line) > columns]


def everywhere(find):
    """Search every Python file of the library. Return ``file:place`` of each hit."""
    return [f"{path.relative_to(ROOT)}:{place}" for path in PYTHON for place in find(read(path))]


def per_thousand_lines(paths):
    """Return the conditional expressions per 1000 lines of code."""
    sources = [read(path) for path in paths]
    found = sum(len(conditionals(source)) for source in sources)
    return 1000 * found / sum(code_lines(source) for source in sources)


def test_conditional_expressions_are_few_in_all_and_in_every_folder():
    folders = defaultdict(list)
    for path in PYTHON:
        inner = path.relative_to(ROOT).parts[:-1]
        folders["/".join(inner[:1])].append(path)
    assert len(folders) > 5
    crowded = {}
    for name, paths in folders.items():
        rate = per_thousand_lines(paths)
        if rate > CONDITIONALS_OF_A_FOLDER:
            crowded[name] = round(rate, 1)
    assert crowded == {}
    assert per_thousand_lines(PYTHON) <= CONDITIONALS


def test_no_conditional_expression_is_inside_another():
    assert everywhere(nested_conditionals) == []


def test_no_line_is_too_long():
    assert everywhere(lambda text: long_lines(text, COLUMNS)) == []
    assert CUDA
    too_long = {path.name: long_lines(read(path), CUDA_COLUMNS) for path in CUDA}
    assert {name: lines for name, lines in too_long.items() if lines} == {}


def test_unrelated_values_are_assigned_on_lines_of_their_own():
    assert everywhere(crowded_assignments) == []


def test_few_functions_take_many_positional_arguments():
    found = everywhere(crowded_signatures)
    assert len(found) <= EXCEPTIONS, found


@pytest.mark.parametrize(
    ("find", "source", "expected"),
    [
        (conditionals, "x = 1 if a else 2", [1]),
        (conditionals, "if a:\n    x = 1\nelse:\n    x = 2", []),
        (nested_conditionals, "x = 1 if a else (2 if b else 3)", [1]),
        (nested_conditionals, "x = (1 if a else 2) + (1 if b else 3)", []),
        (crowded_assignments, "a, b, c = 1, f(x), 3", [1]),
        (crowded_assignments, "a, b, c = f(x)\nd, e = 1, 2", []),
        (crowded_signatures, "def f(a, b, c, d, /, e, f, g, h, i): ...", ["f"]),
        (crowded_signatures, "def f(a, b, c, d, e, f, g, h, *, i): ...", []),
    ],
)
def test_each_is_found_and_nothing_else(find, source, expected):
    assert find(source) == expected


def test_lines_of_code_are_counted_without_documentation_and_comments():
    source = '"""Head,\n\ntwo lines."""\n\n# why\nx = 1  # how\ny = f(\n    2,\n)\n'
    assert code_lines(source) == 4


def test_the_last_column_is_still_allowed():
    assert long_lines("x" * 100 + "\n" + "y" * 101, COLUMNS) == [2]
