"""What the source never does: unpickle, evaluate text, hand a line to a shell."""

import ast
from pathlib import Path

import pytest

import cwy

FILES = sorted(Path(cwy.__file__).parent.rglob("*.py"))
FORBIDDEN = {"eval", "exec", "compile", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def problems(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
            )
            yield from (f"imports {name}" for name in names if name.split(".")[0] in PICKLES)
        if isinstance(node, ast.Call):
            name, options = (
                ast.unparse(node.func),
                {option.arg: ast.unparse(option.value) for option in node.keywords},
            )
            if name in FORBIDDEN:
                yield f"calls {name}"
            if name.endswith("torch.load") and options.get("weights_only") != "True":
                yield "torch.load without weights_only=True"
            if (
                options.get("shell", "False") != "False"
                or options.get("allow_pickle", "False") != "False"
            ):
                yield f"{name} by a shell, or with pickles"


def test_nothing_runs_what_is_read():
    assert len(FILES) > 100
    assert [
        (path.name, found) for path in FILES for found in problems(path.read_text(encoding="utf-8"))
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval(x)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "subprocess.run(line, shell=True)",
        "np.load(f, allow_pickle=True)",
        "yaml.load(f)",
    ],
)
def test_and_would_be_found_out(source):
    assert list(problems(source))
