"""``cwy bench``, run as a user runs it."""

import re
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from subprocess import PIPE, Popen

import pytest
import torch
from matplotlib.image import imread

import cwy
from cwy.bench import BENCHES, runner
from cwy.bench.output.rows import read
from cwy.bench.suites import INSTALL, PEERS, matrix, multiply
from tests.helpers.bench import bench, tiny_program
from tests.helpers.cli import run
from tests.helpers.errors import assert_one_line

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "sizes", "entries", "pictures"),
    [
        (
            "matrix",
            {"8": (8,), "16": (16,), "24x4": (24, 4)},
            matrix.entries,
            ["matrix.png", "matrix-NxM.png"],
        ),
        (
            "matrix",
            {"3x8x8": (3, 8, 8), "2x16x4": (2, 16, 4)},
            matrix.entries,
            ["matrix-BxNxM.png"],
        ),
        (
            "multiply",
            {"8x8x2": (8, 8, 2), "16x4x8": (16, 4, 8)},
            multiply.entries,
            ["multiply.png"],
        ),
    ],
)
def test_a_quick_run_ends_with_a_table_rows_and_a_picture(name, sizes, entries, pictures, tmp_path):
    done = bench("--sizes", ",".join(sizes), "--seed", "3", cwd=tmp_path, name=name)
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert {path.name for path in (tmp_path / "bench").iterdir()} == {f"{name}.csv", *pictures}
    rows = read(tmp_path / "bench" / f"{name}.csv")
    assert {(row.size, row.entry) for row in rows} == {
        (text, e.name) for text, size in sizes.items() for e in entries(size)
    }
    (where,) = {replace(row.context, date="") for row in rows}
    assert (where.seed, where.threads, where.device) == (3, 1, "cpu")
    given = f"--quick --threads 1 --sizes {','.join(sizes)} --seed 3"
    assert where.command == f"cwy bench {name} {given}"
    for row in rows:
        package = row.package.split()[0]
        assert row.status == ("ok" if find_spec(package) else "missing"), row.reason
        assert bool(row.times) == (row.status == "ok")
        if row.status == "ok":
            shown = rf"^{re.escape(row.entry)}( \(complex\))? +[\d.]+ "
        else:
            assert INSTALL in row.reason
            shown = rf"missing: .*{re.escape(row.entry)}"
        assert re.search(shown, done.stdout, re.MULTILINE)
    for picture in pictures:
        assert imread(tmp_path / "bench" / picture).std() > 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "64,12by4"], "'12by4' is not a size. Give N (e.g. 512) or NxM"),
        (["--sizes", "4x64"], "M = 64 is above N = 4"),
        (["--sizes", "64x4x8"], "M = 8 is above N = 4"),
        (["--sizes", "64x4x2x2"], "'64x4x2x2' is not a size"),
        (["--sizes", ""], "'' names no size"),
        (["--peers", "geotroch"], "Did you mean 'geotorch'"),
        (["--methods", "cwi"], "Did you mean 'cwy'"),
        (["--device", "cqu"], "Did you mean 'cpu'"),
        (["--dtype", "flaot32"], "Did you mean 'float32'"),
        (["--out", "taken/here"], "cannot write to the folder --out"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(arguments, message, tmp_path):
    (tmp_path / "taken").touch()
    done = bench(*arguments, cwd=tmp_path)
    assert_one_line(done, message)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("name", [*BENCHES, "all", "advise"])
def test_help_does_not_wait_for_torch(name):
    main = (
        "import sys; from cwy.cli import main\ntry: main()\n"
        "finally: print({'torch', 'numpy', 'matplotlib'} & set(sys.modules), file=sys.stderr)"
    )
    done = run(sys.executable, "-c", main, "bench", name, "--help")
    assert (done.returncode, done.stderr) == (0, "set()\n")
    assert name not in BENCHES or BENCHES[name].quick in done.stdout.replace("│", "").replace(
        "\n", ""
    ).replace(" ", "")


def chosen(**given):
    usual = {"sizes": "8,9,10", "peers": "none", "quick": True, "repeats": 3, "threads": 1}
    return runner.options(BENCHES["matrix"], runner.Request(**(usual | given)))


def test_interrupted_it_writes_the_rows_that_are_complete(tmp_path):
    interrupted = (
        "from dataclasses import replace; from cwy.cli import main\n"
        "from cwy.bench.suites import matrix; entries = matrix.entries\n"
        "def until_9(size):\n"
        "    if size[0] > 9: raise KeyboardInterrupt\n"
        "    return entries(size)\n"
        "matrix.SUITE = replace(matrix.SUITE, entries=until_9); main()"
    )
    few = ["--quick", "--methods", "cwy", "--peers", "none", "--threads", "1"]
    done = run(
        sys.executable,
        "-c",
        interrupted,
        "bench",
        "matrix",
        *few,
        "--sizes",
        "8,9,10",
        cwd=tmp_path,
    )
    assert done.returncode == 130
    rows = read(tmp_path / "bench" / "matrix.csv")
    assert {row.size for row in rows} == {"8", "9"}
    assert f"only the {len(rows)} entries that were complete are written" in done.stdout
    assert (tmp_path / "bench" / "matrix.png").exists()
    done = run(
        sys.executable,
        "-c",
        interrupted,
        "bench",
        "matrix",
        *few,
        "--sizes",
        "10",
        "--out",
        "none",
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (130, "")
    assert "nothing was written" in done.stdout
    assert not list((tmp_path / "none").iterdir())


@pytest.mark.parametrize(
    "given",
    [["matrix", "--quick", "--sizes", "8"], ["all", "--quick", "--threads", "1"]],
    ids=lambda g: g[0],
)
def test_all_is_measured_and_written_though_nobody_reads_on(given, tmp_path):
    # So that it warns before it begins.
    busy = tiny_program("from cwy.bench import runner\nrunner.idle_cores = lambda: 0.0\n")
    with Popen(
        [sys.executable, "-c", busy, "bench", *given], cwd=tmp_path, stdout=PIPE, stderr=PIPE
    ) as going:
        going.stdout.readline()
        going.stdout.close()
        assert going.stderr.read() == b""
    assert going.returncode == 0
    for name in BENCHES if given[0] == "all" else ["matrix"]:
        assert any(row.status == "ok" for row in read(tmp_path / "bench" / f"{name}.csv"))
    assert (tmp_path / "bench" / f"{given[0]}.png").exists()


def test_a_killed_run_leaves_the_rows_of_complete_sizes(tmp_path):
    file = tmp_path / "bench" / "matrix.csv"
    given = ["matrix", "--methods", "cwy", "--peers", "none", "--sizes", "8,1024,2048,4096"]
    with Popen([sys.executable, "-m", "cwy", "bench", *given], cwd=tmp_path, stdout=PIPE) as going:
        end = time.monotonic() + 120
        while not file.exists() and going.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        going.kill()
    rows = read(file)
    assert {row.entry for row in rows if row.size == "8"} == {"matmul", "cwy", "cwy L=N/4"}
    assert all(row.status == "ok" for row in rows)


def test_a_record_lies_among_the_records_without_a_picture(tmp_path):
    few = ["--methods", "cwy", "--peers", "none", "--sizes", "8"]
    done = bench(*few, "--record", "here", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Run it in a checkout of cwy" in done.stderr
    home = tmp_path / "results" / "bench"
    home.mkdir(parents=True)
    for place in ("../here", "a/b"):
        assert bench(*few, "--record", place, cwd=tmp_path).returncode == 1
    done = bench(*few, "--record", "here", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in (home / "here").iterdir()] == ["matrix.csv"]
    (command,) = {one.context.command for one in read(home / "here" / "matrix.csv")}
    assert command.startswith("cwy bench matrix --quick")
    assert command in (tmp_path / "results" / "README.md").read_text()


def test_steps_without_a_backward_pass_have_a_table_of_sizes(tmp_path):
    done = bench("--only", "rgd-c", "--sizes", "12x3,16x4", cwd=tmp_path, name="stiefel")
    assert re.search(r"^entry +12x3 +16x4$", done.stdout.replace("\r", ""), re.MULTILINE)
    assert re.search(r"^rgd-c-qr +[\d.]+ +[\d.]+$", done.stdout, re.MULTILINE)


def test_peers_and_methods_choose_who_takes_part():
    names = lambda **given: {e.name for e in matrix.entries((16,)) if chosen(**given).wanted(e)}
    assert names(methods="none") == {"matmul"}
    assert names(methods="hr") == {"matmul", "hr"}
    some = names(methods="none", peers="geotorch , torch_householder")
    assert some == {"matmul", "geotorch expm", "geotorch cayley", "torch_householder"}
    assert names(only="cwy,hr", skip="cwy L", methods="cwy,hr") == {"cwy", "hr"}
    with pytest.raises(ValueError, match="--skip: no entry begins with 'cyw'"):
        chosen(skip="cyw")
    packages = {
        e.package for size in ((16,), (16, 4)) for e in matrix.entries(size) if e.group == "peer"
    }
    assert packages == set(PEERS) - {"jax", "peft"}


def test_what_forms_whole_squares_is_skipped_with_a_reason_where_they_are_large():
    skipped = {
        e.name: e.why_not(torch.float32, torch.device("cpu")) for e in matrix.entries((30000, 50))
    }
    whole = {name for name, reason in skipped.items() if reason}
    assert whole == {
        "orthogonal(matrix_exp)",
        "orthogonal(cayley)",
        "geotorch expm",
        "geotorch cayley",
        "geoopt cayley step",
    }
    assert "N = 30000 is above the 8192 tried" in skipped["geotorch expm"]
    assert not any(
        e.why_not(torch.float32, torch.device("cpu")) for e in matrix.entries((4096, 64))
    )


def test_our_entries_follow_the_registry(monkeypatch):
    class ComplexOnly(cwy.parametrizations.CWY):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            if not self.dtype.is_complex:
                raise TypeError("serves complex weights only")

    like = cwy.METHODS["cwy"]
    for method in (
        replace(like, name="new"),
        replace(like, name="slim", kind="tall"),
        replace(like, name="u", build=ComplexOnly),
    ):
        monkeypatch.setitem(cwy.METHODS._methods, method.name, method)
    square, tall = ({e.name: e for e in matrix.entries(size)} for size in ((16,), (16, 4)))
    assert {"new", "new L=N/4", "u"} <= square.keys()
    assert {"new", "u"}.isdisjoint(tall)
    assert "slim" in tall
    assert "slim" not in square
    assert {"new", "u"} <= {e.name for e in multiply.entries((16, 4, 2))}
    case = square["u"].make(torch.float32, torch.device("cpu"))
    assert case.call(*case.inputs).dtype == torch.complex64
    maps = {name for name, method in cwy.METHODS.items() if not method.on_manifold}
    assert maps == {e.method for e in (*square.values(), *tall.values())} - {""}
