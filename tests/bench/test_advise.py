"""``cwy bench advise``, and ``cwy bench all``, run as a user runs them."""

import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from textwrap import dedent

import pytest
import torch
from matplotlib.image import imread
from rich.console import Console

import cwy
from cwy.bench import BENCHES
from cwy.bench.advise import Question, advice, ask, candidates, tell
from cwy.bench.output.rows import Time, read
from cwy.bench.output.tables import ms
from cwy.bench.runner import measure
from cwy.bench.suites import PEERS
from tests.helpers.bench import TINY, tiny_program
from tests.helpers.cli import COMMAND, run
from tests.helpers.errors import assert_one_line

pytestmark = pytest.mark.slow

BACKEND = {"cwy": "analytic", "hr": "reference"}
"""Of the op wy, on a CPU."""


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        (["--reflections", "3,8"], None),
        (["--steps", "6", "--nonlinearity", "abs", "--dtype", "float64"], 6),
    ],
)
def test_advice_follows_from_its_table_and_can_be_taken(given, steps, tmp_path):
    done = run(
        COMMAND,
        "bench",
        "advise",
        "--n",
        "24",
        "--batch",
        "4",
        "--threads",
        "1",
        *given,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    table = re.findall(
        r"^((?:cwy|hr|scornn|exprnn|dtriv)\S*(?: L=\d+,)?.*?)  +([\d.]+) +([\d.]+) ",
        done.stdout,
        re.MULTILINE,
    )
    times = [float(both) for _, _, both in table]
    assert times == sorted(times)
    assert {"cwy", "hr", "scornn", "exprnn", "dtriv"} == {
        name.split(",")[0].split()[0] for name, *_ in table
    }
    flat = " ".join(done.stdout.split())
    whole = next(row for row in table if " L=" not in row[0])
    assert f"Fastest with all reflections: {whole[0]}, {whole[2]} ms forward + backward" in flat
    fastest = f"{table[0][2]} ms forward"
    if table[0] == whole:
        fastest = "as above"
    assert f"Fastest: {table[0][0]}, {fastest}" in flat
    # That fewer reflections are a smaller set stands before any of them is named.
    assert flat.index("smaller set of matrices") < flat.index(" L=")
    for code in re.findall(r"cwy\.(?:orthogonal|nn\.OrthogonalRNN)\(.*?\)(?= [FA])", flat):
        made = eval(code, {"cwy": cwy, "torch": torch, "inputs": 5})
        assert cwy.orthogonality_error(made.weight if steps is None else made.weight_hh_l0) < 1e-5
    for code in re.findall(
        r"^ +chart = cwy.*?multiply\(free, x\)$", done.stdout, re.MULTILINE | re.DOTALL
    ):
        given = {"cwy": cwy, "torch": torch, "x": torch.randn(4, 24)}
        exec(dedent(code), given)
        torch.testing.assert_close(given["y"].norm(dim=-1), given["x"].norm(dim=-1))
    advised = re.findall(
        r"Fastest[^:]*: (\w+)[^.:]*?, [\d.]+ ms forward \+ backward"
        r"[^F]*?(?:by the backend '(\w+)' of wy)?\. ",
        flat,
    )
    assert advised
    assert all(by == (BACKEND.get(method, "") if steps is None else "") for method, by in advised)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [(12, 4), (12, 4, 3)])
def test_what_is_advised_is_of_the_dtype_asked_for_and_by_the_backend_named(size):
    for one in candidates(size, [3]):
        names = {"cwy": cwy, "torch": torch, "inputs": 5, "x": torch.randn(4, 12).half()}
        code = one.code(size, "abs", torch.float16, torch.device("cpu"))
        exec(code if one.how == "without Q" else f"layer = {code}", names)
        made = names["y"] if one.how == "without Q" else next(names["layer"].parameters())
        assert made.dtype == torch.float16, code
        assert one.served(size, torch.float16, torch.device("cpu")) == BACKEND.get(
            one.method.name, ""
        )
    assert "dtype" not in one.code(size, "abs", torch.float32, torch.device("cpu"))
    assert "device='cuda:1'" in one.code(size, "abs", torch.float32, torch.device("cuda:1"))


def test_it_says_when_one_thread_is_faster():
    asked = ask(Question(n=8, batch=2, reflections="2", threads=1))
    rows, _ = measure(asked.options, Console(quiet=True))
    assert "thread" not in advice(asked, rows)
    *_, second, first = sorted(rows, key=lambda row: (row.group == "ours", -row.seconds("both")))
    inline = lambda row, seconds: replace(row, times={**row.times, "both_inline": Time(seconds)})
    slower = [inline(row, 0.9 * row.seconds("both")) for row in rows]
    assert "thread" not in advice(asked, slower)
    best = first.seconds("both")
    faster = [inline(row, best / (2 if row is second else 1.5)) for row in rows]
    told = advice(asked, faster).splitlines()[-1]
    assert (
        f"set_multithreading_enabled(False), the fastest is {second.entry}, {ms(best / 2)} ms"
        in told
    )
    shown = StringIO()
    tell(asked, faster, Console(width=40, file=shown))
    assert "Forward + backward in one thread, ms" in " ".join(shown.getvalue().split())
    code = [line for line in advice(asked, faster).splitlines() if line.startswith(" ")]
    assert max(map(len, code)) > 40
    assert set(code) <= set(shown.getvalue().splitlines())
    assert advice(asked, []) == ""
    assert "Stopped" not in shown.getvalue()
    tell(asked, rows[:2], Console(width=80, file=shown), stopped=True)
    assert (
        f"Stopped: 2 of {len(rows)} were timed. The advice covers only those." in shown.getvalue()
    )


def test_hr_is_not_tried_where_it_would_keep_too_much():
    names = {one.name for one in candidates((1024, 64), [16])}
    assert {"hr, without Q", "hr L=16, Q formed", "cwy, Q formed"} <= names
    assert "hr, Q formed" not in names


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--nonlinearity", "abs"], "Give its steps, too: --steps 100"),
        (["--steps", "3", "--nonlinearity", "reul"], "Did you mean 'relu'"),
        (["--reflections", "9"], "9 is above N = 8"),
    ],
)
def test_a_mistake_is_one_line(given, message, tmp_path):
    done = run(COMMAND, "bench", "advise", "--n", "8", *given, cwd=tmp_path)
    assert_one_line(done, message)


def test_all_runs_every_benchmark_and_ends_with_a_table_and_a_picture(tmp_path):
    done = run(
        sys.executable,
        "-c",
        tiny_program(),
        "bench",
        "all",
        "--quick",
        "--threads",
        "1",
        "--seed",
        "3",
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    absent = [peer for peer in PEERS if not find_spec(peer)]
    assert ("Not installed, so not timed: " + ", ".join(sorted(absent)) in done.stdout) == bool(
        absent
    )
    ending = done.stdout[done.stdout.index("Forward + backward") :]
    for name, bench in BENCHES.items():
        rows = read(tmp_path / "bench" / f"{name}.csv")
        assert {row.size for row in rows} == {TINY[bench.forms[0]].split(",")[0]}
        assert {row.status for row in rows} <= {"ok", "missing", "skipped"}, [
            row.reason for row in rows
        ]
        assert {row.context.seed for row in rows} == {3}
        assert {row.context.command for row in rows} == {
            "cwy bench all --quick --threads 1 --seed 3"
        }
        counted = [row.flops("forward") for row in rows if row.status == "ok"]
        assert all(counted) == bench.counts
        assert re.search(rf"^{name} .*\n{rows[0].size} +[\d.]+ ms", ending, re.MULTILINE)
    assert imread(tmp_path / "bench" / "all.png").std() > 0.05
