"""The command line, run as a user runs it."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

import cwy
from cwy.experiments import demo

COMMAND = shutil.which("cwy", path=str(Path(sys.executable).parent)) or "cwy"


def run(*arguments: str | Path, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8", **env}
    return subprocess.run([str(a) for a in arguments], cwd=cwd, env=env, capture_output=True, text=True, encoding="utf-8")


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["--version"]])
def test_help_and_version_do_not_wait_for_torch(arguments):
    done = run(
        sys.executable,
        "-c",
        "import atexit, sys; from cwy.cli import main\n"
        "atexit.register(lambda: print({'torch', 'numpy', 'matplotlib'} & set(sys.modules), file=sys.stderr))\n"
        "main()",
        *arguments,
    )
    assert (done.returncode, done.stderr) == (0, "set()\n")
    assert ("Usage" if "--help" in arguments else f"cwy {cwy.__version__}") in done.stdout


@pytest.mark.parametrize("absent", [["typer", "rich", "matplotlib"], ["rich"], ["matplotlib"]], ids=", ".join)
def test_without_the_extras_it_says_what_to_install(absent, tmp_path):
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if package.name not in absent:
            (tmp_path / package.name).symlink_to(package)
    source = Path(cwy.__file__).parents[1]
    # -S: no site-packages but the links.
    main = f"import sys; sys.path += [{str(source)!r}, {str(tmp_path)!r}]; from cwy.cli import main; main()"
    done = run(sys.executable, "-S", "-c", main, "--help")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"needs {', '.join(absent)}." in done.stderr
    assert 'pip install "cwy[cli]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_demo_shows_every_square_method_and_draws_the_curves(tmp_path):
    done = run(COMMAND, "demo", "--steps", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ +(\S.*?) {2,}[\d.]+% +\S+ +[\d.]+ ms +\d+ *$", done.stdout, re.MULTILINE)
    names, skipped = demo.choose()
    assert rows == [*names, demo.FREE]
    assert {*names, *skipped} == set(cwy.METHODS)
    told = " ".join(done.stdout.split())
    assert all(re.search(rf"Skipped [^:]*\b{name}\b[^:]*: {re.escape(reason)}", told) for name, reason in skipped.items())
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["demo", "demo/demo.png"]
    picture = imread(tmp_path / "demo" / "demo.png")
    assert picture.shape[1] > 1000
    assert picture.std() > 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--methods", "hr,cwi"], "Did you mean 'cwy'"), (["--out", "taken/here"], "cannot write to the folder --out")],
)
def test_demo_names_a_mistake_in_one_line_and_writes_nothing(arguments, message, tmp_path):
    (tmp_path / "taken").touch()
    done = run(COMMAND, "demo", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_demo_follows_the_registry(monkeypatch):
    class ComplexOnly(cwy.parametrizations.CWY):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            if not self.dtype.is_complex:
                raise ValueError("serves complex weights only")

    like = cwy.METHODS["cwy"]
    for method in (
        replace(like, name="new"),
        replace(like, name="slim", kind="tall"),
        replace(like, name="u", build=ComplexOnly),
    ):
        monkeypatch.setitem(cwy.METHODS._methods, method.name, method)
    names, skipped = demo.choose()
    assert names[-1] == "new"
    assert {"slim", "u"} <= skipped.keys()
    assert demo.choose(["new", " cwy", "new", ""]) == (["new", "cwy"], {})
    with pytest.raises(ValueError, match="'u' can't take part: serves complex weights only"):
        demo.choose(["cwy", "u"])


def test_demo_finds_the_rotation_that_fits_best_and_the_free_weight_does_not():
    task = demo.problem(seed=1)
    fit = lambda w: (task.x @ w.mT - task.y).square().mean()
    assert cwy.orthogonality_error(task.best) < 1e-5
    assert torch.linalg.det(task.best) > 0
    assert fit(task.best) < fit(task.rotation)
    found, free = demo.train(task, "cwy", 300), demo.train(task, demo.FREE, 300)
    assert found.errors[0] == pytest.approx(free.errors[0], rel=1e-5)
    assert found.errors[-1] == pytest.approx(task.error(task.best), rel=0.05)
    assert found.orthogonality < 1e-5
    assert free.errors[-1] > 1.5 * found.errors[-1]
    assert free.orthogonality > 0.01
    assert "cwy gets there." in demo.findings(task, [found, free])


def test_demo_is_drawn_by_its_seed():
    first, again, other = (demo.train(demo.problem(seed), "cwy", 3).errors for seed in (0, 0, 1))
    assert first == again
    assert first != other
