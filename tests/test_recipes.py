"""Recipes that need packages beyond torch: the ``py`` blocks of a page run where these are."""

import re
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parent.parent / "docs/recipes.md"
BLOCKS = list(
    re.finditer(r"^```(py|python)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
)
NAMES = [
    re.search(r"^import (\w+)", block[2], re.MULTILINE)[1] for block in BLOCKS if block[1] == "py"
]


def test_the_page_has_such_recipes():
    assert NAMES == ["lightning", "onnx"]


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_runs(name, tmp_path, monkeypatch):
    """Run the block that imports this package, after the first two, which it builds on."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {"__name__": "page"}
    (recipe,) = (block[2] for block in BLOCKS if block[2].startswith(f"import {name}"))
    pytest.importorskip(name)
    if name == "onnx":
        pytest.importorskip("onnxscript")
    for code in [BLOCKS[0][2], BLOCKS[1][2], recipe]:
        exec(compile(code, PAGE, "exec"), namespace)
