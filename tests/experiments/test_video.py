"""Video prediction as a task: what is measured, every method, stopping and going on, the record and
the report.
"""

import io
import json
import signal
from dataclasses import replace

import pytest
import torch
from PIL import Image
from rich.console import Console

from cwy.experiments.data import kth, videos
from cwy.experiments.engine import runner, task
from cwy.experiments.engine.config import ConfigError
from cwy.experiments.engine.display import Display
from cwy.experiments.engine.distributed import Group
from cwy.experiments.engine.folder import Folder
from cwy.experiments.engine.loop import Loop
from cwy.experiments.engine.signals import Stop, Stopped
from cwy.experiments.report import find_runs, write
from cwy.experiments.report.panels import arrange
from cwy.experiments.report.tables import summary
from cwy.experiments.video.model import Predictor
from cwy.experiments.video.pictures import read
from cwy.experiments.video.recipes import METHODS
from tests.helpers.runs import numbers, resume, rows, same, weights
from tests.helpers.sample_runs import write_run

pytestmark = pytest.mark.slow

TINY = {"channels": 2, "epochs": 3, "batch_size": 2, "bucket": 4, "log_every": 1, "save_every": 2}


LENGTHS = {"train": (6, 8), "validation": (5,), "test": (4, 5)}


def keep(folder, lengths):
    """Decoded videos, as a machine without a decoder gets them: squares that move over a grey
    ground.
    """
    parts = {split: [] for split in lengths}
    for split, counts in lengths.items():
        for i, count in enumerate(counts):
            frames = torch.full((count, 128, 128), 100, dtype=torch.uint8)
            for t in range(count):
                frames[t, 30 : 60 + 8 * i, 9 * t : 9 * t + 30] = 200 - 5 * t
            parts[split].append(frames)
    folder.mkdir(exist_ok=True)
    videos.write(folder / "kth-walking.safetensors", videos.assemble(parts), {})


@pytest.fixture
def walking(tmp_path, monkeypatch):
    """A KTH of five sequences, already decoded."""
    monkeypatch.setenv("CWY_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("CWY_FRAMES", str(tmp_path / "frames"))
    keep(tmp_path / "frames", LENGTHS)
    return tmp_path


def settings(method="tcwy", **changes):
    texts = tuple(f"{key}={value}" for key, value in (TINY | changes).items())
    return task.settings("kth/walking", method, assignments=texts)


def make(method="tcwy", **changes):
    return task.load("kth")(settings(method, **changes), torch.device("cpu"))


def start(folder, method="tcwy", device="cpu", **changes):
    return Loop(
        replace(settings(method, **changes), device=device),
        Folder(folder),
        Group(device),
        Display(None),
    )


class Still(torch.nn.Module):
    """Predicts that nothing moves."""

    def forward(self, frames):
        return frames


def test_the_loss_is_l1_summed_over_a_frame_and_averaged_over_all_frames(walking):
    frames = kth.load("walking").frames.double() / 255
    change = (frames[1:] - frames[:-1]).abs().sum((1, 2))
    for bucket, size in ((4, 2), (16, 1)):
        one = make(bucket=bucket, test_batch_size=size)
        for split, metrics in (
            ("validation", one.evaluate(Still())["validation"]),
            ("test", one.conclude(Still())[0]["test"]),
        ):
            expected = torch.cat(
                [change[start : stop - 1] for start, stop in one.videos.sequences[split]]
            ).mean()
            assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    frames, length, _ = one.batch(0)
    assert frames.shape[1] == 1 + 16, "padded to whole buckets"
    assert not frames[0, length[0] :].any()
    # The mean over a batch is one over its frames, however it is shared out.
    one = make()
    batch = one.batch(0)
    whole, _ = one.loss(Still(), batch)
    parts = [one.loss(Still(), tuple(part[i : i + 1] for part in batch))[0] for i in range(2)]
    assert whole.item() == pytest.approx(torch.stack(parts).mean().item(), rel=1e-5)
    expected = torch.cat(
        [change[start : stop - 1] for start, stop in one.videos.sequences["train"]]
    ).mean()
    assert whole.item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_prediction_sees_what_came_before_and_nothing_else():
    for method in ("tcwy", "convlstm", "zeros"):
        model = Predictor(method, 2).eval()
        frames = torch.rand(1, 5, 32, 32)
        changed = frames.clone()
        changed[:, 2] = 0
        with torch.no_grad():
            moved = (model(frames) - model(changed)).abs().amax((0, 2, 3)) > 0
        assert moved.tolist() == [False, False, True, method != "zeros", method != "zeros"]


def test_the_network_is_the_papers():
    # 0.72 M parameters, Table 4; the free weights of a seed are the same whatever the transition.
    states = []
    for method in ("tcwy", "glorot"):
        torch.manual_seed(3)
        model = Predictor(method)
        assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == 0.72
        states.append(
            {key: value for key, value in model.state_dict().items() if "weight_hh" not in key}
        )
    assert same(*states)
    assert 3 * sum(p.numel() for p in model.parameters()) < sum(
        p.numel() for p in Predictor("convlstm").parameters()
    )


@pytest.mark.parametrize("method", ["tcwy", "rgd-adam", "convlstm"])
def test_stopped_and_resumed_equals_never_stopped(method, walking, tmp_path):
    start(tmp_path / "whole", method).run()
    stop, stopped = Stop(), start(tmp_path / "run", method)
    stopped.model.last.bias.register_hook(
        lambda g: setattr(stop, "signal", 15 if stopped.step == 1 else 0)
    )
    with pytest.raises(Stopped, match=r"\b2\b"):
        stopped.run(stop)
    again = start(tmp_path / "run", method)

    def ask(model, *_):
        if (
            not model.training
            and rows(tmp_path / "run")[-1]["split"] == "validation"
            and again.step == again.task.iterations
        ):
            signal.raise_signal(signal.SIGTERM)

    # Amid the test of the best state.
    again.model.register_forward_hook(ask)
    with (
        Stop() as stop,
        pytest.raises(Stopped, match=rf"\b{again.task.iterations}\b"),
    ):
        again.run(stop)
    assert resume(tmp_path / "run")[0] == 0
    assert same(*(weights(tmp_path / name) for name in ("whole", "run")))
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    assert rows(tmp_path / "run")[-1]["split"] == "test"


def test_every_method_trains_and_the_best_state_is_tested_and_drawn(walking, tmp_path):
    assert len(METHODS) == 11
    for method in METHODS:
        start(tmp_path / method, method).run()
    runs = find_runs([tmp_path / method for method in METHODS])
    for run in runs:
        validation = run.curve("validation", "loss")[1]
        assert len(validation) == 3
        assert run.record["best"]["value"] == min(validation)
        best = make(run.method)
        model = best.model()
        model.load_state_dict(weights(run.folder, "best.safetensors"))
        with torch.no_grad():
            assert best.conclude(model.eval())[0]["test"]["loss"] == pytest.approx(
                run.last("test", "loss")
            )
        assert run.record["data"]["sequences"] == [2, 1, 2]
        strip = read(run.folder / "frames.png")
        assert strip.true.shape == strip.predicted.shape == (3, 128, 128)
    page = write(runs, tmp_path)[0].read_text()
    for text in ("KTH, walking", "% of the set", "data:image/webp;base64"):
        assert text in page
    assert Image.open(tmp_path / "kth-walking-moving.webp").n_frames > 1
    assert Image.open(tmp_path / "kth-walking-frames.webp").n_frames == 1


def test_the_papers_numbers_stand_beside_its_own_settings_alone(tmp_path):
    rows = [
        {"step": 9, "split": split, "seconds": 1.0, "epoch": 150, "loss": 170.0}
        for split in ("validation", "test")
    ]

    def told(*runs):
        for seed, (method, part, changes) in enumerate(runs):
            config = task.settings("kth/walking", method, seed).to_dict() | changes
            write_run(
                tmp_path / str(len(runs)) / str(seed),
                config,
                rows,
                data={"part": f"{part}% of the set's frames"},
            )
        (panel,) = arrange(find_runs([tmp_path / str(len(runs))]))
        table = summary(panel)
        cells = [cell.text for row in table.rows for cell in row.cells]
        return panel.finding, " ".join([*table.heads, *cells])

    assert "134.6" in told(("tcwy", "100.0", {}))[1]
    finding, table = told(("tcwy", "100.0", {"epochs": 3}), ("rgd-adam", "100.0", {}))
    assert "paper" not in finding
    assert ["134.6" in table, "142.6" in table] == [False, True]
    finding, table = told(*[("tcwy", "6.6", {})] * 3)
    assert finding.endswith("(on 6.6% of the set's frames: not to be compared with the paper)")
    assert "134.6" in table
    assert "on the whole set" in table
    finding, _ = told(*[("tcwy", "6.6", {})] * 3, ("own", "100.0", {}))
    assert (
        finding
        == "not to be compared: runs on 100.0% of the set's frames and 6.6% of the set's frames"
    )


def test_a_recipe_may_name_its_method(walking, tmp_path):
    console, texts = Console(file=io.StringIO()), [f"{key}={value}" for key, value in TINY.items()]
    sweep = runner.Sweep("kth/rgd-c-c-walking", assignments=texts, out=tmp_path / "run")
    assert runner.train(sweep, console, Stop()) == 0
    assert "% of the set's frames" in " ".join(console.file.getvalue().split())
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert (config["method"], config["action"]) == ("rgd-c-c", "walking")
    assert task.settings("kth/walking").method == "tcwy"
    assert task.settings("kth/own-boxing").name == "own-boxing-seed0"


def test_what_is_missing_is_said(walking, tmp_path):
    keep(walking / "frames", LENGTHS | {"validation": ()})
    with pytest.raises(ConfigError, match="no validation videos of kth/walking are here"):
        start(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(
        ConfigError, match=r"unknown action of kth 'waking'. Did you mean 'walking'"
    ):
        make(action="waking")


@pytest.mark.parametrize("method", ["tcwy", "rgd-c-qr", "own", "convlstm"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_however_it_runs_the_numbers_are_the_same(device, method, walking, tmp_path):
    # On a GPU: a graph for each of the batches' shapes, recorded after three steps, against steps
    # one by one.
    changes = {"epochs": 12 if device == "cuda" else 2, "batch_size": 1}
    records = [
        start(tmp_path / str(eager), method, device, eager=eager, **changes).run()
        for eager in (False, True)
    ]
    for split in ("train", "validation", "test"):
        assert records[0]["final"][split]["loss"] == pytest.approx(
            records[1]["final"][split]["loss"], rel=2e-2
        )
    assert ("peak_memory" in records[0]) == (device == "cuda")
