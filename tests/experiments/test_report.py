"""The report: what a reader sees of runs, in a real browser too."""

import html
import itertools
import json
import os
import random
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from cwy.experiments.engine import task
from cwy.experiments.report import ReportError, Run, find_runs, read_run, write
from cwy.experiments.report.describe import describe
from cwy.experiments.report.figure import draw, outliers, styles
from cwy.experiments.report.panels import arrange
from cwy.experiments.report.tables import summary
from tests.helpers.cli import COMMAND, run
from tests.helpers.errors import assert_one_line
from tests.helpers.sample_runs import CONFIG, copying, mnist, write_run

RECORDS = Path(__file__).parents[2] / "results"
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        copying(root, "cwy", seed, fall=3)
        copying(root, "scornn", seed, fall=0.5 + seed / 4)
    copying(root, "cwy", 0, fall=2, reflections=48)
    copying(root, "lstm", 0)
    copying(root / "deeper", "exprnn", 0, fall=3, finished=False)
    copying(root, "cwy", 0, T=2000, fall=2)
    mnist(root, "cwy", 0, 0.978)
    return root


def text(page):
    return re.sub(
        r"\s+",
        " ",
        html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL)),
    )


def test_runs_are_compared_by_task_size_and_setting(runs):
    panels = {panel.title: panel for panel in arrange(find_runs([runs]))}
    assert list(panels) == [
        "Copying, T = 1000",
        "Copying, T = 2000",
        "Pixel-by-pixel MNIST, N = 170",
    ]
    first = panels["Copying, T = 1000"]
    assert [(one.label, len(one.runs)) for one in first.series] == [
        ("cwy (L = N)", 3),
        ("cwy (L = 48)", 1),
        ("exprnn", 1),
        ("scornn", 3),
        ("lstm", 1),
    ]
    assert first.finding == (
        "cwy learns to recall the symbols. scornn gets under the no-memory baseline. "
        "lstm does not. exprnn is not finished"
    )


def test_a_setting_that_an_earlier_version_lacks_has_its_default(tmp_path):
    for seed in range(3):
        copying(tmp_path, "cwy", seed)
    configs = sorted(tmp_path.glob("*/config.json"))
    for path, clip in zip(configs, (None, None, 1.0), strict=True):
        config = json.loads(path.read_text()) | {"clip": clip}
        if path == configs[0]:
            del config["clip"]
        path.write_text(json.dumps(config))
    (panel,) = arrange(find_runs([tmp_path]))
    assert {one.label: len(one.runs) for one in panel.series} == {
        "cwy (clip = none)": 2,
        "cwy (clip = 1)": 1,
    }


def translation(*texts):
    settings = task.settings("nmt/paper-cwy-64", assignments=texts)
    return Run(Path(), settings.to_dict(), [], None)


def labels(runs):
    (panel,) = arrange(runs)
    return [one.label for one in panel.series]


@pytest.mark.parametrize(
    ("variants", "expected"),
    [
        (
            ["", "clip=1", "embedding_scale=0.05", "gate=true", "lr=1e-3"],
            ["cwy", "clip = 1", "embedding_scale = 0.05", "gate = true", "lr = 0.001"],
        ),
        (["", "clip=1"], ["clip = none", "clip = 1"]),
        (
            ["", "gate=true", "gate=true thin_gate=true"],
            ["gate = false", "gate = true, thin_gate = false", "gate = true, thin_gate = true"],
        ),
        (
            ["", "clip=1", "reflections=32", "reflections=32 clip=0.5"],
            [
                "clip = none, L = 64",
                "clip = 1, L = 64",
                "clip = none, L = 32",
                "clip = 0.5, L = 32",
            ],
        ),
    ],
)
def test_a_label_leaves_out_what_is_usual_or_means_nothing(variants, expected):
    runs = [translation(*texts.split()) for texts in variants]
    found = [label.removeprefix("cwy (").removesuffix(")") for label in labels(runs)]
    assert found == expected


def test_runs_that_differ_have_different_labels():
    gates = ["gate=false", "gate=true", "gate=true thin_gate=true", "gate=true gate_encoder=false"]
    axes = [("clip=none", "clip=1"), gates, ("reflections=64", "reflections=32")]
    axes += [(f"{name}=1e-2", f"{name}=1e-3") for name in ("lr", "orthogonal_lr")]
    far = "a-folder-with-a-long-name/" * 3
    axes += [("evaluate_every=none", "evaluate_every=3")]
    axes += [("input_scale=1.2341", "input_scale=1.2349"), (f"file={far}a", f"file={far}b")]
    runs = [translation(*" ".join(texts).split()) for texts in itertools.product(*axes)]
    draw = random.Random(0)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 16, len(runs)):
        for _ in range(10):
            assert len(labels(draw.sample(runs, count))) == count


def test_runs_on_different_data_are_not_averaged():
    run = translation("file=pairs.tsv")
    seeds = [replace(run, record={"data": {"sha256": 2 * name}}) for name in ("ab", "ab", "cd")]
    assert len(labels(seeds)) == 2


def test_a_run_without_its_log_has_the_numbers_of_its_record():
    records = sorted((RECORDS / "nmt").glob("*/record.json"))
    assert records
    for path in records:
        run = read_run(path.parent)
        restored = replace(run, metrics=[])
        assert (restored.steps, restored.seconds) == (run.steps, run.seconds)
        for column in describe(run.task).columns:
            value = column.value(restored)
            assert value in (None, column.value(run)), (run.folder, column.heading)
            assert value is not None or column.heading != "loss per word", run.folder


def test_a_run_that_was_stopped_is_not_judged(tmp_path):
    copying(tmp_path, "cwy", 0, fall=3)
    for seed in 1, 2:
        copying(tmp_path, "cwy", seed, finished=False)
    for method in "urnn", "lstm", "rnn":
        copying(tmp_path, method, 0, finished=False, iterations=32_000)
    (tmp_path / "T1000-rnn-seed0/diverged.txt").touch()
    (panel,) = arrange(find_runs([tmp_path]))
    assert (
        panel.finding
        == "cwy learns to recall the symbols. urnn and lstm are not finished. rnn diverged"
    )
    for method in "eurnn", "exprnn":
        copying(tmp_path / "more", method, 0, finished=False)
    (panel,) = arrange(find_runs([tmp_path]))
    assert (
        panel.finding == "cwy learns to recall the symbols. 4 others are not finished. rnn diverged"
    )
    shutil.rmtree(tmp_path / "more")
    (panel,) = arrange(find_runs([tmp_path]))
    rows = {row.head: row for row in summary(panel).rows}
    cwy, urnn, rnn = (rows[method] for method in ("cwy", "urnn", "rnn"))
    assert (cwy.count, cwy.warning) == ("3 seeds", "2 unfinished, at 4,000 and 4,000 of 4,000")
    assert [cell.text for cell in cwy.cells[:3]] == ["1.92e-5", "1,063", "100.0%"]
    assert urnn.warning == "unfinished, at 4,000 of 32,000"
    assert [cell.text for cell in urnn.cells[:4]] == ["–"] * 4
    assert rnn.warning == "diverged, at 4,000 of 32,000"
    words = text(write(find_runs([tmp_path]), tmp_path)[0].read_text())
    assert all(f" {row.warning} " in words for row in rows.values())
    assert "5 are not finished." in words


def test_the_page_tells_every_number_and_needs_nothing_else(runs, tmp_path):
    written = write(find_runs([runs, runs / "deeper"]), tmp_path)
    names = {path.name for path in written}
    assert names == {path.name for path in tmp_path.iterdir()}
    assert {
        "report.html",
        "copying-T1000-loss.png",
        "copying-T1000-loss.svg",
        "mnist-N170-accuracy.svg",
    } < names
    page = (tmp_path / "report.html").read_text()
    assert not re.findall(r"""(?:src|href|url|@import)\W+(?:https?:)?//""", page)
    words = text(page)
    for one in find_runs([runs]):
        assert f"{one.folder.name} " in words
        if one.record and one.task == "copying":
            logged = replace(one, record=None)
            assert one.record["crossings"] == {
                "0.01": logged.crossing(0.01),
                "0.001": logged.crossing(0.001),
            }
    for told in (
        "goes to zero, the fastest",
        "no memory (0.0204)",
        "above 95%",
        "unfinished, at 4,000 of 4,000",
        "1 is not finished.",
        "training loss under 0.001 at iteration",
        "never",
        "Some CPU",
        "0123456789ab",
        "orthogonal_lr",
        "2e-05",
    ):
        assert told in words, told
    for path in tmp_path.glob("*.svg"):
        labels = re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())
        assert any("(" in label or "accuracy" in label for label in labels), "axes have units"
        assert {"iteration", "epoch"} & set(labels)
        assert any(label.startswith("cwy") for label in labels), "and a legend"
    again = tmp_path / "again"
    again.mkdir()
    write(find_runs([runs, runs / "deeper"]), again)
    assert all((again / name).read_bytes() == (tmp_path / name).read_bytes() for name in names), (
        "the same runs, the same files"
    )


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs a headless browser")
@pytest.mark.parametrize("committed", [False, True])
def test_a_browser_draws_every_curve_without_complaint(committed, runs, tmp_path):
    found = find_runs([RECORDS if committed else runs])
    page = write(found, tmp_path)[0]
    # Among the committed runs some were stopped early: their curves are short, or a point.
    wide, high = (4, 0) if committed else (200, 5)
    probe = """<script>for (const svg of document.querySelectorAll("svg.wide")) {
        const boxes = [...svg.querySelectorAll('g[id*="--series "]')].map((curve) =>
        curve.getBoundingClientRect());
        svg.dataset.drawn = boxes.filter((box) => box.width > WIDE && box.height > HIGH).length +
        "/" + boxes.length;
    }</script>"""
    probe = probe.replace("WIDE", str(wide)).replace("HIGH", str(high))
    (tmp_path / "probed.html").write_text(page.read_text().replace("</body>", probe + "</body>"))
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1280,6000",
    ]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr"]
    view = lambda *more: subprocess.run(
        [BROWSER, *options, *more], capture_output=True, text=True, timeout=120
    )
    seen = view("--dump-dom", (tmp_path / "probed.html").as_uri())
    assert "CONSOLE" not in seen.stderr
    drawn = re.findall(r'data-drawn="(\d+)/(\d+)"', seen.stdout)
    assert len(drawn) == len(list(tmp_path.glob("*.svg"))) >= 4
    assert all(int(count) and count == total for count, total in drawn), drawn
    view(f"--screenshot={tmp_path / 'page.png'}", page.as_uri())
    pixels = imread(tmp_path / "page.png")[..., :3]
    for style in styles(arrange(found)[0].series):
        near = abs(pixels - to_rgb(style["color"])).max(-1) < 0.02
        assert near.sum() > 500, style


def test_the_last_training_point_is_a_mean_over_as_many_steps_as_the_others(tmp_path):
    def row(step, loss):
        return {"step": step, "split": "train", "seconds": 1.0, "loss": loss}

    config = {"task": "later", "method": "cwy", "seed": 0, **CONFIG}
    short = write_run(tmp_path / "short", config, [row(20, 3.0), row(40, 2.0), row(45, 6.0)])
    assert read_run(short).curve("train", "loss") == ([20, 40, 45], [3.0, 2.0, 3.0])
    whole = write_run(tmp_path / "whole", config, [row(20, 3.0), row(40, 2.0), row(60, 6.0)])
    assert read_run(whole).last("train", "loss") == 6.0


def test_an_unknown_task_is_drawn_too(tmp_path):
    folder = copying(tmp_path, "cwy", 0, task="later")
    assert "later" in text(write(find_runs([folder]), tmp_path)[0].read_text())
    assert (tmp_path / "later-loss.png").exists()


def panel_of(folder, losses):
    for method, curve in losses.items():
        config = {"task": "later", "method": method, "seed": 0, **CONFIG}
        rows = [
            {"step": 20 * place, "split": "train", "seconds": 1.0, "loss": loss}
            for place, loss in enumerate(curve, 1)
        ]
        write_run(folder / method, config, rows)
    (panel,) = arrange(find_runs([folder]))
    return panel


def test_a_curve_far_above_the_others_does_not_squeeze_them(tmp_path):
    losses = {"cwy": (3, 1), "hr": (4, 2), "exprnn": (3.5, 1.5), "lstm": (5, 2), "rnn": (900, 800)}
    panel = panel_of(tmp_path, losses)
    (curve,) = panel.description.curves
    assert outliers(curve, panel.series) == {"rnn": 900}
    others = [one for one in panel.series if one.method != "rnn"]
    assert outliers(curve, others) == {}, "a curve that leaves the others half of the axis stays"
    (axes,) = draw(panel, curve).axes
    low, high = axes.get_ylim()
    assert low < 1
    assert 5 < high < 10
    assert any("900" in line.get_label() for line in axes.get_lines())


def test_arrows_of_two_curves_above_the_axis_are_next_to_each_other(tmp_path):
    low = dict.fromkeys(("cwy", "hr", "exprnn", "lstm", "gru"), (3, 1))
    panel = panel_of(tmp_path, {**low, "rnn": (900, 800), "rgd": (90_000, 80_000)})
    (curve,) = panel.description.curves
    (axes,) = draw(panel, curve).axes
    arrows = [line for line in axes.get_lines() if line.get_linestyle() == "None"]
    places = [line.get_transform().transform(line.get_xydata()) for line in arrows]
    assert len(arrows) == 2
    assert abs(places[0] - places[1])[:, 0].min() > arrows[0].get_markersize()


@pytest.mark.parametrize("losses", [(3e-1, 1e-7), (3.0, 2.0), (5e7, 2e3)])
def test_numbers_at_a_logarithmic_axis_have_no_small_exponents(tmp_path, losses):
    panel = panel_of(tmp_path, {"cwy": losses})
    (curve,) = panel.description.curves
    figure = draw(panel, replace(curve, scale="log"))
    figure.canvas.draw()
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    shown = [label for label in labels if label]
    assert len(shown) > 1
    numbers = [float(label.replace(",", "")) for label in shown]
    assert numbers == sorted(numbers)


def test_curves_of_one_point_each_have_no_figure_next_to_longer_ones():
    (panel,) = arrange(find_runs([RECORDS / "movingmnist"]))
    lengths = {curve.split: len(panel.drawn(curve)) for curve in panel.description.curves}
    assert lengths["validation"] == 0
    assert lengths["train"] == len(panel.series)


def test_a_torn_last_line_is_left_out_and_a_damaged_file_is_named(tmp_path):
    folder = copying(tmp_path, "cwy", 0, finished=False)
    log = folder / "metrics.jsonl"
    whole = find_runs([tmp_path])[0]
    log.write_text(log.read_text() + '{"step": 4020, "spl')
    assert find_runs([tmp_path])[0].metrics == whole.metrics
    for damage, message in (("{\n", "line 201"), ('{"split": "train"}\n', "line 201.*step")):
        log.write_text("".join(json.dumps(row) + "\n" for row in whole.metrics) + damage)
        with pytest.raises(ReportError, match=f"metrics.jsonl is damaged: {message}"):
            find_runs([tmp_path])
    log.unlink()
    assert "unfinished, at 0 of 4,000" in text(
        write(find_runs([tmp_path]), tmp_path)[0].read_text()
    )
    (folder / "config.json").write_text('{"task": "copying"}')
    with pytest.raises(ReportError, match=r"config.json is not a run's: it has no 'method'"):
        find_runs([tmp_path])


def replace_once(old, new):
    return lambda path: path.write_bytes(path.read_bytes().replace(old, new, 1))


DAMAGE = {
    "T1000-cwy-seed0": ("config.json", replace_once(b'"task"', b'"tas\xeb"'), "config.json"),
    "T1000-cwy-seed1": ("config.json", replace_once(b'"T"', b'"U"'), "KeyError: 'T'"),
    "T1000-cwy-seed2": (
        "metrics.jsonl",
        replace_once(b'60, "split"', b'60, "rplit"'),
        "metrics.jsonl is damaged: line 3",
    ),
    "T1000-scornn-seed0": (
        "metrics.jsonl",
        replace_once(b'"loss": ', b'"loss": "\xff",'),
        "metrics.jsonl is damaged: line 1",
    ),
    "T1000-scornn-seed1": (
        "record.json",
        lambda path: os.truncate(path, path.stat().st_size // 2),
        "record.json",
    ),
    "T1000-scornn-seed2": (
        "record.json",
        replace_once(b'"device": "Some CPU"', b'"devise": "Some CPU"'),
        "KeyError: 'device'",
    ),
    "T1000-lstm-seed0": (
        "record.json",
        lambda path: (path.unlink(), path.mkdir()),
        "record.json: Is a directory",
    ),
}


@pytest.mark.slow
def test_damaged_runs_are_named_and_left_out_and_the_others_reported(runs, tmp_path):
    root = tmp_path / "runs"
    shutil.copytree(runs, root)
    for name, (file, damage, _) in DAMAGE.items():
        damage(root / name / file)
    done = run(COMMAND, "report", root)
    assert done.returncode == 1
    told = done.stderr.splitlines()
    assert len(told) == len(DAMAGE)
    assert done.stdout.startswith(f"The report: {root / 'report.html'}\n")
    words = text((root / "report.html").read_text())
    for name, (_, _, reason) in DAMAGE.items():
        assert any(
            line.startswith("cwy: left out: ") and f"/{name}" in line and reason in line
            for line in told
        ), reason
        assert f"/{name}" in words
    assert "every seed is shown" not in words
    whole = [one.folder.name for one in find_runs([runs]) if one.folder.name not in DAMAGE]
    assert len(whole) == 4
    assert all(f" {name} " in words for name in whole)
    shutil.rmtree(root / "deeper")
    for path in [*root.glob("*.*"), *(root / name for name in whole)]:
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
    done = run(COMMAND, "report", root)
    assert (done.returncode, done.stdout) == (1, "")
    assert all(f"/{name}" in done.stderr for name in DAMAGE)
    assert {path.name for path in root.iterdir()} == DAMAGE.keys()


@pytest.mark.slow
def test_the_command_writes_where_it_is_told_and_names_mistakes(runs, tmp_path):
    out = tmp_path / "new/place"
    done = run(COMMAND, "report", runs / "deeper", "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"The report: {out / 'report.html'}"
    (tmp_path / "taken").touch()
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ([tmp_path / "nowhere"], "is not a folder"),
        ([tmp_path / "empty"], "no run below"),
        ([runs / "deeper", "--out", tmp_path / "taken/here"], "cannot write to the folder --out"),
    ):
        done = run(COMMAND, "report", *arguments)
        assert_one_line(done, message)
    assert {path.name for path in tmp_path.iterdir()} == {"new", "taken", "empty"}
