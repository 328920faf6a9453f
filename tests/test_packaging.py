"""What users install: a typed wheel, an sdist that has its tests, extras that mean what README
states.
"""

import ast
import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import cwy

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
README = (ROOT / "README.md").read_text()
SOURCE = Path(cwy.__file__).parent
# What a module is imported as, where that is not its package's name.
PACKAGES = {"PIL": "pillow", "cuda": "cuda-bindings"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ROOT / "src").is_dir(), reason="the wheel is tested from outside, without its source"
    ),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist, as a front end of builds makes them."""
    out = tmp_path_factory.mktemp("dist")
    build = (
        "import sys; from hatchling import build\n"
        "print(build.build_wheel(sys.argv[1]), build.build_sdist(sys.argv[1]), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", build, str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    wheel, sdist = done.stdout.split()[-2:]
    return {"wheel": out / wheel, "sdist": out / sdist}


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The interpreter of a fresh environment that has the wheel, and reaches the packages of this
    one.
    """
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    scheme = {"base": str(home), "platbase": str(home)}
    site = Path(sysconfig.get_path("purelib", "venv", scheme))
    with zipfile.ZipFile(built["wheel"]) as wheel:
        wheel.extractall(site)
    # The paths only: the .pth files in them, which would bring the checkout back, are not read.
    outer = [path for path in sys.path if path.endswith("site-packages")]
    (site / "outer.pth").write_text("\n".join(outer) + "\n")
    return Path(sysconfig.get_path("scripts", "venv", scheme)) / "python"


def outside(python, folder, *arguments):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [str(python), *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_the_wheel_has_every_file_of_the_package_and_no_other(built):
    ours = {
        path.relative_to(SOURCE.parent).as_posix() for path in SOURCE.rglob("*") if path.is_file()
    }
    ours = {name for name in ours if "__pycache__" not in name}
    with zipfile.ZipFile(built["wheel"]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = email.message_from_bytes(wheel.read(f"cwy-{cwy.__version__}.dist-info/METADATA"))
    assert names == ours
    assert "cwy/py.typed" in names
    assert metadata["Author"] == "cwy contributors"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    plain = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert plain == ["torch>=2.11"], "the library itself needs only torch"


def test_the_sdist_has_all_that_the_tests_read(built):
    with tarfile.open(built["sdist"]) as sdist:
        names = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    expected = {
        "PKG-INFO",
        "conftest.py",
        "constraints.txt",
        "mkdocs.yml",
        "Makefile",
        "pyproject.toml",
    }
    for folder in ("src", "tests", "docs", "results", ".github"):
        found = [
            path
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        ]
        expected |= {path.relative_to(ROOT).as_posix() for path in found}
    assert expected <= names
    tops = {name.partition("/")[0] for name in names}
    assert not tops & {".venv", "runs", "site", "dist", "demo", "bench"}


def test_the_wheel_works_where_nothing_else_of_the_project_is(installed, tmp_path):
    code = (
        "from importlib.metadata import entry_points, version\n"
        "import cwy, json, torch\n"
        "layer = cwy.orthogonal(torch.nn.Linear(6, 6))\n"
        "command = next(iter(entry_points(group='console_scripts', name='cwy'))).load()\n"
        "report = {'file': cwy.__file__, 'version': version('cwy'), 'command': command.__module__,"
        " 'error': cwy.orthogonality_error(layer.weight)}\n"
        "print(json.dumps(report))"
    )
    done = outside(installed, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert Path(report["file"]).is_relative_to(installed.parents[1])
    assert report["version"] == cwy.__version__
    assert report["command"] == "cwy.cli"
    assert report["error"] < 1e-5


def marked(script):
    lines = (ROOT / "tests/users" / script).read_text().splitlines()
    return {(script, number) for number, line in enumerate(lines, 1) if line.endswith("# mistake")}


def test_mypy_checks_a_users_script(installed, tmp_path):
    scripts = [str(ROOT / "tests/users" / name) for name in ("user.py", "mistakes.py")]
    options = ["--config-file", str(ROOT / "tests/users/mypy.ini"), "--cache-dir", str(tmp_path)]
    command = [
        sys.executable,
        "-m",
        "mypy",
        *options,
        "--python-executable",
        str(installed),
        *scripts,
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = re.findall(r"(\w+\.py):(\d+): error", done.stdout)
    assert {(name, int(number)) for name, number in found} == marked("mistakes.py"), (
        done.stdout + done.stderr
    )


def test_pyright_checks_a_users_script(installed, tmp_path):
    """By basedpyright: it comes with Node.js and downloads nothing when it runs, unlike pyright."""
    settings = {"typeCheckingMode": "strict", "include": [str(ROOT / "tests/users")]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--project", str(tmp_path), "--outputjson"]
    done = subprocess.run(
        [*command, "--pythonpath", str(installed)], cwd=tmp_path, capture_output=True, text=True
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    lines = {(Path(one["file"]).name, one["range"]["start"]["line"] + 1) for one in found}
    assert lines == marked("mistakes.py"), done.stdout


def requirements(extra):
    """The packages of an extra, those of the extras it names included."""
    found = set()
    for line in EXTRAS[extra]:
        name, inner = re.match(r"([\w-]+)(?:\[([\w,]+)\])?", line).groups()
        if name == "cwy":
            found |= {package for part in inner.split(",") for package in requirements(part)}
        else:
            found.add(name.lower())
    return found


def imports(folder):
    """The packages that the files below a folder import, at the top or inside a function."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            found |= {name.partition(".")[0] for name in names}
    found = {PACKAGES.get(name, name) for name in found - sys.stdlib_module_names}
    return found - {"torch", "cwy"}


def test_extras_hold_what_the_code_imports():
    library = ["manifolds", "nn", "ops", "optim", "parametrizations"]
    for part in library:
        assert imports(SOURCE / part) <= requirements("cuda")
    assert imports(SOURCE / "peft") <= requirements("peft")
    # numpy comes with matplotlib, for which it is a hard requirement.
    assert imports(SOURCE / "experiments") - {"numpy"} <= requirements("experiments")
    assert requirements("cli") <= requirements("experiments")
    # What the demonstration, every run and every figure need.
    assert {"typer", "rich", "matplotlib", "safetensors", "filelock"} <= requirements("cli")


def test_readme_names_every_extra_for_users():
    named = set(re.findall(r'"\.?(?:cwy)?\[(\w+)\]"', README))
    assert named == EXTRAS.keys() - {"test", "docs", "dev"}


def test_every_development_package_is_pinned():
    pins = dict(
        re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    normal = {name.lower().replace("_", "-") for name in pins}
    assert {name.replace("_", "-") for name in requirements("dev")} <= normal


def test_workflows_test_the_oldest_and_the_newest():
    pins = dict(
        re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    oldest, newest = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
    assert PROJECT["dependencies"] == [f"torch>={oldest['torch'].removesuffix('.0')}"]
    assert PROJECT["requires-python"] == f">={oldest['python']}"
    assert newest["torch"] == pins["torch"]
    minor = "Programming Language :: Python :: 3."
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if line.startswith(minor)]
    assert named[0] == oldest["python"]
    assert named[-1] == newest["python"]


def test_the_paper_is_cited_in_one_way():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    paper = citation["preferred-citation"]
    bibtex = re.search(r"^```bibtex\n(.*?)^```", README, re.DOTALL | re.MULTILINE)[1]
    authors = " and ".join(
        f"{one['family-names']}, {one['given-names']}" for one in paper["authors"]
    )
    fields = dict(re.findall(r"(\w+)\s*= \{(.*)\},$", bibtex, re.MULTILINE))
    assert fields["title"].replace("{", "").replace("}", "") == paper["title"]
    assert fields["author"] == authors
    assert fields["year"] == str(paper["year"])
    assert citation["authors"] == PROJECT["authors"]
