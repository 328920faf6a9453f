"""Run folders from a stranger: links, forged fields, escape codes. None leads elsewhere, or to a
traceback.
"""

import io
import json
import math
import re
import shutil
import sys
from collections import Counter
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from rich.console import Console

from cwy.experiments import cli
from cwy.experiments.engine.config import ConfigError
from cwy.experiments.engine.folder import read_log
from cwy.experiments.engine.listing import table
from cwy.experiments.engine.runner import RunError
from cwy.experiments.report import find_runs, write
from tests.helpers.cli import cwy
from tests.helpers.runs import resume, same, train, weights
from tests.helpers.sample_runs import copying

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there"),
]


def plant(folder, names, victim):
    for name in names:
        (folder / name).symlink_to(victim)


@pytest.fixture
def begun(whole, tmp_path):
    """A run that has its settings and nothing else."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_bytes((whole / "config.json").read_bytes())
    return run


def test_no_link_is_written_through(begun, whole, tmp_path):
    victim = tmp_path / "victim"
    victim.touch()
    written = ("metrics.jsonl", "record.json", "weights.safetensors", "best.safetensors")
    plant(begun, [f".{name}.partial" for name in written], victim)
    plant(begun, ["metrics.jsonl", "weights.safetensors", "best.safetensors"], victim)
    saved = [f"step-{step:08d}.pt" for step in range(7, 301, 7)]
    plant(begun / "checkpoints", [f".{name}.partial" for name in saved], victim)
    plant(begun / "checkpoints", [f".{name}.sha256.partial" for name in saved], victim)
    assert resume(begun)[0] == 0
    assert same(weights(begun), weights(whole))
    plant(begun, ["report.html", ".report.html.partial", ".copying-T5-loss.png.partial"], victim)
    write(find_runs([begun]), begun)
    assert victim.read_bytes() == b""
    assert [path for path in begun.rglob("*") if path.is_symlink()] == []


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard"])
def test_a_link_in_place_of_a_folder_is_refused(name, begun, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "step-00000001.pt").write_bytes(b"theirs")
    (begun / "checkpoints").rmdir()
    (begun / name).symlink_to(victim)
    with pytest.raises(RunError, match=f"{name} is a link"):
        resume(begun)
    assert [path.name for path in victim.iterdir()] == ["step-00000001.pt"]


SCRIPT = '"><img src=x onerror=alert(1)><script>alert(1)</script>{{ 7 * 7 }}'
HOSTILE = [
    SCRIPT,
    "../../elsewhere",
    "/elsewhere",
    "a\x1b[2J\x07b\u202e",
    "\ud800",
    r"$x$ \frac \1",
    "x" * 10_000,
    "",
    "con",
    None,
    True,
    -5,
    0,
    2**70,
    10**400,
    0.5,
    math.nan,
    math.inf,
    [],
    {"a": [1]},
]
CONTENTS = [
    b"",
    b"[",
    b"[" * 100_000,
    b"\xff",
    b"null",
    b"{}",
    b'{"step": Infinity}\n',
    b"9" * 5000,
    b"\0",
]
FILES = ("config.json", "record.json", "metrics.jsonl")


def fields(content, path=()):
    """The place of every value in some JSON."""
    for key, value in content.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from fields(value, (*path, key))


def changed(content, place, value):
    """The same JSON with one value changed, or with a key that is the value."""
    *path, last = place
    copy = deepcopy(content)
    inside = copy
    for key in path:
        inside = inside[key]
    inside[last] = value
    return copy


def mutations(run):
    """Every file of a run with every field made hostile, as (file, content)."""
    for name in FILES:
        first, _, rest = (run / name).read_bytes().partition(b"\n")
        lines = name == "metrics.jsonl"
        whole = json.loads(first if lines else (run / name).read_bytes())
        for place in fields(whole):
            # The settings in a record are a copy that nobody reads.
            if place[0] == "config":
                continue
            for value in HOSTILE:
                text = json.dumps(changed(whole, place, value)).encode()
                yield name, text + b"\n" + rest if lines else text
        for key in (SCRIPT, "\x1b[2J", "\ud800"):
            text = json.dumps(whole | {key: 1}).encode()
            yield name, text + b"\n" + rest if lines else text
        for content in CONTENTS:
            yield name, content + b"\n"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A folder with one sound run, and one for each hostile value of each field."""
    root = tmp_path_factory.mktemp("hostile") / "runs"
    sound = copying(root, "cwy", 0, fall=3)
    rows = (sound / "metrics.jsonl").read_text().splitlines(keepends=True)
    (sound / "metrics.jsonl").write_text("".join(rows[-3:]))
    for number, (name, content) in enumerate(mutations(sound)):
        folder = root / f"hostile{number}\x1b[2J"
        shutil.copytree(sound, folder)
        (folder / name).write_bytes(content)
        if name == "record.json" and number % 3 == 0:
            # More of the record is read where there is no log.
            (folder / "metrics.jsonl").unlink()
    return root


class Page(HTMLParser):
    """The tags and attributes of a page."""

    def __init__(self, content):
        super().__init__()
        self.tags, self.attributes = Counter(), set()
        self.feed(content)

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes.update(name for name, _ in attrs)


def test_a_report_of_hostile_runs_shows_the_sound_one_and_writes_nowhere_else(hostile, tmp_path):
    before = sorted(hostile.parent.rglob("*"))
    damaged = []
    runs = find_runs([hostile], damaged.append)
    assert len(runs) + len(damaged) == len(list(hostile.iterdir())), "each run is shown or named"
    assert len(damaged) > len(runs) > 50
    assert all(told.isprintable() for told in damaged)
    places = tmp_path / "sound", tmp_path / "report"
    for place in places:
        place.mkdir()
    (sound,) = find_runs([hostile / "T1000-cwy-seed0"])
    # Texts of every field, in few figures.
    texts = [
        run
        for run in runs
        if re.search(r"alert|elsewhere|frac", json.dumps([run.config, run.record]))
    ]
    assert len({run.task for run in texts}) == 5
    plain = write([sound, replace(sound, record=None)], places[0], ["cannot show a run."])
    written = write([sound, replace(sound, record=None), *texts], places[1], damaged)
    assert sorted(hostile.parent.rglob("*")) == before
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(
        [*plain, *written]
    )
    assert all(re.fullmatch(r"[A-Za-z0-9-]+\.(html|png|svg)", path.name) for path in written)
    usual, page = (Page(made[0].read_text(encoding="utf-8")) for made in (plain, written))
    assert set(page.tags) - set(usual.tags) <= {"h2", "ul", "li", "a"}
    assert page.tags["script"] == 1
    assert page.attributes - usual.attributes <= {"colspan"}
    assert "alert(1)" in written[0].read_text(encoding="utf-8"), "it is shown, as text"
    for path in places[1].glob("*.svg"):
        ElementTree.fromstring(path.read_bytes())


def test_the_table_of_hostile_runs_names_each_of_them(hostile):
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    view = table(hostile)
    assert view.row_count == len(list(hostile.iterdir()))
    console.print(view)
    assert all(line.isprintable() for line in console.file.getvalue().split("\n"))


def test_a_hostile_run_is_resumed_or_refused_in_a_sentence(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    kept = {name: (run / name).read_bytes() for name in FILES}
    # Every third: each value still meets many fields, and each field many values.
    for name, content in list(mutations(whole))[::3]:
        for file in FILES:
            (run / file).write_bytes(kept[file])
        (run / name).write_bytes(content)
        if name != "record.json":
            (run / "record.json").unlink()
        with suppress(ValueError):
            read_log(run / "metrics.jsonl")
            if name == "metrics.jsonl":
                # A sound log is a sound run, which takes its time.
                continue
        with suppress(ConfigError, RunError):
            assert resume(run)[0] == 0


def test_escape_codes_in_names_do_not_reach_the_terminal(hostile, tmp_path, capsys):
    folder = tmp_path / "a\x1b[2Jb"
    shutil.copytree(hostile / "T1000-cwy-seed0", folder)
    cli.runs(tmp_path)
    cli.report([folder])
    with pytest.raises(SystemExit) as ended:
        cli.report([folder / "none"])
    seen = capsys.readouterr()
    resumed = cwy("resume", folder)
    assert "Traceback" not in resumed.stderr
    for text in (seen.out, str(ended.value), resumed.stdout + resumed.stderr):
        assert r"a\x1b[2Jb" in text.replace("\n", "")
        assert all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize(
    "setting", [f"T={10**20}", f"hidden_size={10**9}", "hidden_size=1000000", "T=1" + "0" * 400]
)
def test_absurd_settings_get_a_sentence(setting, tmp_path):
    key, _, value = setting.partition("=")
    with pytest.raises((ConfigError, RunError), match=f"{key}|memory"):
        train(tmp_path / "run", **{key: value})
    assert not (tmp_path / "run").exists()
