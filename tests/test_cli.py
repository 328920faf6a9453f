"""The command line, run as a user runs it."""

import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from matplotlib.image import imread
from rich.console import Console

import cwy
from cwy.bench import BENCHES
from cwy.experiments import demo
from tests.helpers.cli import COMMAND, run
from tests.helpers.errors import assert_one_line

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "arguments", [["--help"], ["demo", "--help"], ["train", "--help"], ["--version"]]
)
def test_help_and_version_do_not_wait_for_torch(arguments):
    done = run(
        sys.executable,
        "-c",
        "import atexit, sys; from cwy.cli import main\n"
        "heavy = {'torch', 'numpy', 'matplotlib'}\n"
        "atexit.register(lambda: print(heavy & set(sys.modules), file=sys.stderr))\n"
        "main()",
        *arguments,
    )
    assert (done.returncode, done.stderr) == (0, "set()\n")
    assert ("Usage" if "--help" in arguments else f"cwy {cwy.__version__}") in done.stdout


@pytest.mark.parametrize(
    ("absent", "extra", "command"),
    [
        (["typer", "rich"], "cli", "--help"),
        (["rich"], "cli", "--help"),
        (["matplotlib"], "cli", "demo"),
        (["safetensors"], "cli", "demo"),
        (["PIL"], "video", "train movingmnist"),
        (["psutil"], "cli", "bench matrix --sizes 8 --quick"),
    ],
)
def test_without_the_extras_it_says_what_to_install(absent, extra, command, tmp_path):
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if package.name not in absent:
            (tmp_path / package.name).symlink_to(package)
    source = Path(cwy.__file__).parents[1]
    # -S: no site-packages but the links.
    paths = [str(source), str(tmp_path)]
    main = f"import sys; sys.path += {paths!r}; from cwy.cli import main; main()"
    done = run(sys.executable, "-S", "-c", main, *command.split())
    assert (done.returncode, done.stdout) == (1, "")
    assert f" {', '.join(absent)}." in done.stderr
    assert f'pip install "cwy[{extra}]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_it_runs_where_there_is_no_fcntl_and_no_hangup_as_on_windows(tmp_path):
    code = (
        "import pkgutil, signal, sys\n"
        "from importlib import import_module\n"
        "import psutil  # which imports resource on Linux, and has a file for Windows\n"
        "sys.modules['fcntl'] = sys.modules['resource'] = None\n"
        "del signal.SIGHUP\n"
        "import cwy\n"
        "for module in pkgutil.walk_packages(cwy.__path__, 'cwy.'):\n"
        "    room = module.name.split('.')[1]\n"
        "    if room in ('experiments', 'bench', 'cli', 'info', 'terminal'):\n"
        "        import_module(module.name)\n"
        "from cwy.cli import main\n"
        "main()"
    )
    given = ["--set", "T=2", "--set", "hidden_size=4", "--set", "iterations=2"]
    done = run(
        sys.executable, "-c", code, "train", "copying/small", "--out", tmp_path / "run", *given
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/record.json").exists()


def test_demo_shows_a_table_a_sentence_and_the_reports_picture(tmp_path):
    done = run(COMMAND, "demo", "--iterations", "2", "--methods", "cwy,urnn,lstm", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = re.findall(
        r"^ +(\S+) {2,}\S.* +[\d,]+ +[\d.]+% +[\d.]+ +[\d.]+ s *$", done.stdout, re.MULTILINE
    )
    assert rows == ["cwy", "urnn", "lstm"]
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "cwy, urnn and lstm do not beat the no-memory baseline." in re.sub(
        r"\s+", " ", done.stdout
    ), "nobody learns in 2"
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*"))
    assert written == [
        "demo",
        "demo/copying-T50-loss.png",
        "demo/copying-T50-loss.svg",
        "demo/report.html",
    ]
    assert all(path in done.stdout for path in written[1:])
    picture = imread(tmp_path / written[1])
    assert picture.shape[1] > 1000
    assert picture.std() > 0.05


def test_the_help_of_the_demo_names_the_steps_it_takes():
    (steps,) = {one.config.iterations for one in demo.prepare(["cwy", "lstm"], None, 0)}
    told = " ".join(run(COMMAND, "demo", "--help", COLUMNS="200").stdout.split())
    assert f"(the recipe's, {steps})" in told


def test_demo_is_drawn_by_its_seed():
    losses = lambda seed: [
        row["loss"]
        for row in demo.race(demo.prepare(["cwy"], 3, seed), Console(quiet=True))[0].metrics
    ]
    assert losses(0) == losses(0) != losses(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "hr,cwi"], "Did you mean 'cwy'"),
        (["--out", "taken/here"], "cannot write to the folder --out"),
    ],
)
def test_demo_names_a_mistake_in_one_line_and_writes_nothing(arguments, message, tmp_path):
    (tmp_path / "taken").touch()
    done = run(COMMAND, "demo", *arguments, cwd=tmp_path)
    assert_one_line(done, message)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_demo_stopped_leaves_nothing_behind(how, tmp_path):
    env = {**os.environ, "TMPDIR": str(tmp_path / "work")}
    (tmp_path / "work").mkdir()
    command = [COMMAND, "demo", "--out", str(tmp_path / "out"), "--methods", "cwy"]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while not list((tmp_path / "work").rglob("metrics.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(how)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + how, "cwy: stopped, and nothing was written.\n")
    assert {path.name for path in tmp_path.rglob("*")} == {"work", "out"}


@pytest.mark.parametrize("name", BENCHES)
def test_every_benchmark_says_what_its_options_mean(name):
    told = run(COMMAND, "bench", name, "--help", COLUMNS="200").stdout
    for words in ("Sizes, in the form above.", "CPU threads.", "Seed of every input."):
        assert words in told
