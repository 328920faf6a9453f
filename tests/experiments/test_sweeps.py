"""Sweeps: many runs in several processes, which may be stopped, killed and gone on with."""

import json
import math
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from cwy.experiments import sweeps
from cwy.experiments.engine import task
from cwy.experiments.engine.config import ConfigError
from cwy.experiments.engine.files import Damaged
from cwy.experiments.nmt import networks, speed, stages, sweep
from cwy.experiments.pool import ATTEMPTS, train
from cwy.experiments.report import find_runs
from cwy.experiments.sweeps import Place, Planned
from cwy.experiments.worker import LEFT, STOPPED, train_one
from tests.helpers.language import TINY

pytest.importorskip("platformdirs")
pytest.importorskip("sacrebleu")
pytestmark = pytest.mark.slow


RECORDS = Path(__file__).parents[2] / "results"
STARTED = RECORDS / "bench" / "h200" / "translation-start.jsonl"


def test_a_sweep_tunes_on_validation_pairs_and_tests_the_best_epoch(pairs, tmp_path):
    tiny = (f"file={pairs}", *TINY)
    network = networks.Network("tiny", "cwy", ("nonlinearity=relu",), points=2, seeds=(3,))
    wild = networks.Network("wild", "rnn", ("nonlinearity=relu", "lr=1e30"), points=0)
    place = Place(tmp_path)
    trials = [replace(run, settings=(*run.settings, *tiny)) for run in stages.trials([network])]
    wild_run = Planned("wild", "nmt/paper", "rnn", 0, (*wild.settings, *tiny))
    ended = list(train([*trials, wild_run], place, processes=2))
    assert sum("finished" in line for line in ended) == 2
    assert sum("wild: diverged" in line for line in ended) == 1
    losses = []
    for trial in trials:
        record = sweeps.read(tmp_path, trial)
        assert "test" not in record["final"], "the choice never sees the test pairs"
        losses.append(record["best"]["value"])
        assert sorted(path.name for path in (tmp_path / trial.folder).iterdir()) == [
            "config.json",
            "metrics.jsonl",
            "record.json",
        ]
    records = sweeps.Records(tmp_path)
    points = stages.best_points(records, [network, wild])
    assert points == {"tiny": losses.index(min(losses))}
    longer = replace(network, points=3)
    assert stages.unfinished(records, [network], stages.FIRST_SEARCH) == []
    (sentence,) = stages.unfinished(records, [longer], stages.FIRST_SEARCH)
    assert "of 3 points of the search 2 have ended" in sentence
    (final,) = stages.finals([network, wild], points, seeds=(0, 3))
    assert set(stages.point(points["tiny"], network)) <= set(final.settings)
    final = replace(final, settings=(*final.settings, *tiny, "epochs=3"))
    assert "finished" in next(train([final], place, processes=1))
    record = sweeps.read(tmp_path, final)
    rows = [
        json.loads(line)
        for line in (tmp_path / final.folder / "metrics.jsonl").read_text().splitlines()
    ]
    by_epoch = [row["loss"] for row in rows if row["split"] == "validation"]
    assert len(by_epoch) == 3
    assert record["best"]["value"] == min(by_epoch)
    assert {"loss", "bleu", "paper_loss"} <= record["final"]["test"].keys()
    assert "was finished" in next(train([final], place, processes=1))
    other = replace(final, settings=(*final.settings, "lr=0.5"))
    assert "failed" in next(train([other], place, processes=1)), "its settings are others"
    double = replace(place, precision="float64")
    assert "precision is float32 there" in next(train([final], double, processes=1))
    over = replace(place, end=0.0)
    later = replace(final, folder="later")
    assert "the time was over" in next(train([later], over, processes=1))
    tamer = replace(wild_run, settings=(*wild_run.settings, "lr=1e-3"))
    assert "failed" in next(train([tamer], place, processes=1)), "another run diverged there"
    every = [final, wild_run, later]
    lines = sweeps.lines(tmp_path, every)
    assert [line["status"] for line in lines] == ["finished", "diverged", "not finished"]
    sweeps.merge(tmp_path / "lines.jsonl", lines)
    again = tmp_path / "again"
    known = sweeps.read_known(tmp_path / "lines.jsonl")
    sweeps.restore(sweeps.Records(again, known), every, place)
    assert sweeps.lines(again, every) == lines
    sweeps.check_known(known, every, place)
    elsewhere = replace(place, out=tmp_path / "elsewhere")
    for run in (final, wild_run):
        changed = replace(run, settings=(*run.settings, "lr=0.5"))
        with pytest.raises(ConfigError, match=rf"The first is {run.folder}: lr is"):
            sweeps.check_known(known, [changed], elsewhere)
    with pytest.raises(ConfigError, match="precision is float32 there and float64 here"):
        sweeps.check_known(known, every, replace(elsewhere, precision="float64"))
    assert {run.folder.name for run in find_runs([again])} == {
        Path(run.folder).name for run in (final, wild_run)
    }
    assert "diverged before" in next(train([wild_run], replace(place, out=again), processes=1))


def test_a_sweep_goes_on_with_a_run_that_its_deadline_stopped(pairs, tmp_path):
    settings = (f"file={pairs}", *TINY, "validation=0.1", "epochs=8")
    runs = [Planned(name, "nmt/paper", "cwy", 0, settings) for name in ("stopped", "whole")]
    over = Place(tmp_path, stop=time.time())
    assert "the time was over" in next(train(runs[:1], over, processes=1))
    assert not (tmp_path / "stopped").exists()
    # In this process, which has loaded everything: the run begins, and does not end in time.
    soon = Place(tmp_path, stop=time.time() + 0.3)
    assert train_one(runs[0], soon) == STOPPED
    assert sweeps.read(tmp_path, runs[0]) is None
    other = replace(runs[0], settings=(*settings, "lr=0.5"))
    assert "failed" in next(train([other], Place(tmp_path), processes=1)), "its settings are others"
    ended = list(train(runs, Place(tmp_path), processes=1))
    assert [line.rpartition(" ")[2] for line in ended] == ["finished", "finished"]
    stopped, whole = (sweeps.read(tmp_path, run) for run in runs)
    assert stopped["best"] == whole["best"]
    assert stopped["final"]["test"] == whole["final"]["test"]


def test_a_sweep_outlives_a_process_that_dies(pairs, tmp_path):
    settings = (f"file={pairs}", *TINY, "validation=0.1", "final_test=false")
    runs = [Planned(f"run{seed}", "nmt/paper", "rnn", seed, settings) for seed in range(3)]
    endless = replace(runs[0], folder="endless", settings=(*settings, "epochs=100000"))
    log = tmp_path / "endless.log"

    def kill():
        """Kill the process of the endless run whenever it has begun."""
        for _ in range(ATTEMPTS):
            while not (log.exists() and (tmp_path / "endless" / "config.json").exists()):
                time.sleep(0.05)
            parent = psutil.Process()
            busy = max(parent.children(), key=lambda child: sum(child.cpu_times()[:2]))
            # It must not notice that its folder is gone.
            busy.suspend()
            shutil.rmtree(tmp_path / "endless")
            busy.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    ended = train([endless, *runs], Place(tmp_path), processes=1)
    statuses = [line.partition(" s  ")[2] for line in ended]
    killer.join()
    assert sorted(statuses) == [
        "endless: failed: its process died",
        *(f"run{seed}: finished" for seed in range(3)),
    ]


def endless_settings(pairs):
    """Settings of a run of the stage "gate" that does not end."""
    (first, *_) = stages.gates()
    return (*first.settings, f"file={pairs}", *TINY, "epochs=100000", "log_every=1")


def endless_sweep(pairs, out, *options):
    """Start a sweep whose first run has begun and does not end. Return it with the run's folder."""
    shrunk = [f"--set={one}" for one in (f"file={pairs}", *TINY, "epochs=100000", "log_every=1")]
    command = ["-m", "cwy.experiments.nmt.sweep", "gate", str(out), *shrunk]
    process = subprocess.Popen(
        [sys.executable, *command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    folder = out / "gate" / "none-tanh-seed3"
    while not (folder / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.05)
    return process, folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_sweep_that_can_go_on(number, pairs, tmp_path):
    process, folder = endless_sweep(pairs, tmp_path)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    output, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "The same command goes on" in error
    assert f"none-tanh-seed3: {STOPPED}" in output
    assert list((folder / "checkpoints").iterdir())
    lines = (tmp_path / "gate.jsonl").read_text().splitlines()
    assert {json.loads(line)["status"] for line in lines} == {"not finished"}
    assert not psutil.wait_procs(children, timeout=20)[1], "no process stays behind"


def test_the_processes_of_a_sweep_that_is_killed_save_their_runs_and_end(pairs, tmp_path):
    process, folder = endless_sweep(pairs, tmp_path)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert not psutil.wait_procs(children, timeout=30)[1]
    assert list((folder / "checkpoints").iterdir())


def test_a_process_that_is_stopped_alone_does_not_stop_its_run(pairs, tmp_path):
    settings = (f"file={pairs}", *TINY, "validation=0.1", "final_test=false", "log_every=1")
    runs = [Planned(f"run{seed}", "nmt/paper", "rnn", seed, settings) for seed in range(3)]

    def stop_one():
        while not (tmp_path / "run0" / "metrics.jsonl").exists():
            time.sleep(0.01)
        psutil.Process().children()[-1].terminate()

    stopper = threading.Thread(target=stop_one)
    stopper.start()
    ended = sorted(line.partition(" s  ")[2] for line in train(runs, Place(tmp_path), processes=1))
    stopper.join()
    assert ended == [f"run{seed}: finished" for seed in range(3)]


def test_a_sweep_stops_while_a_process_is_starting(pairs, tmp_path):
    process, _ = endless_sweep(pairs, tmp_path, "--processes=2")
    other = tmp_path / "gate" / "matrices-tanh-seed3" / "metrics.jsonl"
    children = [
        child
        for child in psutil.Process(process.pid).children()
        if "spawn_main" in " ".join(child.cmdline())
    ]
    if not other.exists():
        # The second process is slow. A terminal sends Ctrl-C to all.
        children[-1].suspend()
    for child in (psutil.Process(process.pid), *children):
        child.send_signal(signal.SIGINT)
    time.sleep(0.5)
    children[-1].resume()
    output, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in error
    assert f"none-tanh-seed3: {STOPPED}" in output
    assert not psutil.wait_procs(children, timeout=20)[1]


def test_a_second_sweep_leaves_the_run_of_the_first_alone(pairs, tmp_path):
    process, folder = endless_sweep(pairs, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    same = Planned("gate/none-tanh-seed3", "nmt/small", "cwy", 3, endless_settings(pairs))
    (line,) = train([same], Place(tmp_path), processes=1)
    assert line.endswith(LEFT)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert f"none-tanh-seed3: {STOPPED}" in output
    assert json.loads((folder / "config.json").read_text()) == config


def test_every_network_of_the_sweep_has_settings_that_exist():
    points = {network.name: 0 for network in networks.NETWORKS}
    every = [
        *stages.trials(networks.NETWORKS),
        *stages.finals(networks.NETWORKS, points, networks.SEEDS),
        *stages.rescues(stages.RESCUES, epochs=3),
        *stages.rescues(stages.RESCUES, stages.EPOCHS),
        *stages.starts(),
        *stages.decays(networks.NETWORKS, stages.DROPOUTS, networks.SEEDS),
        *stages.gates(),
        *stages.trials(networks.CONTENDERS, stages.SECOND_SEARCH),
        *stages.finals(networks.CONTENDERS, points, networks.SEEDS, stages.SECOND_SEARCH),
    ]
    start = stages.point(0, networks.CONTENDERS[-1], stages.SECOND_SEARCH)
    assert {"warmup=1000", *start} < set(every[-1].settings)
    small = networks.SMALL_CONTENDERS
    every += stages.trials(small, stages.SMALL_SEARCH)
    every += stages.finals(small, points, networks.SMALL_SEEDS, stages.SMALL_SEARCH)
    assert every[-1].what == "nmt/small"
    assert every[-1].seed == networks.SMALL_SEEDS[-1]
    assert len({one.folder for one in every}) == len(every)
    for number in range(networks.POINTS):
        texts = stages.point(number, small[0], stages.SMALL_SEARCH)
        start = dict(text.split("=") for text in texts)
        assert start["orthogonal_lr"] == start["lr"], "one learning rate for all weights"
    for one in every:
        task.settings(one.what, one.method, one.seed, one.settings)
    assert networks.select("lstm,baselines,cwy-64-abs")[-1].like == "cwy-128-abs"
    assert len(networks.select("lstm,baselines")) == len(networks.BASELINES)
    assert len(networks.select(speed.TIMED)) == speed.TIMED.count(",") + 1
    tested = {one.folder for one in every if "final_test=false" not in one.settings}
    assert all(name.startswith("nmt/") or name.endswith("-epochs10") for name in tested)
    with pytest.raises(ConfigError, match="unknown network 'lsmt'"):
        networks.select("lsmt")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("final",), "It needs the runs of tune, in the same folder"),
        (("final-decay",), "It needs the runs of tune-decay,"),
        (("tune-decay", "--networks", "rivals"), "Its networks: lstm, gru,"),
        (("decay", "--networks", "lstm,exprnn-relu"), "no run of --networks exprnn-relu."),
        (("final", "--networks", "cwy-256-tanh-gate-thin"), "no run of --networks cwy-256-tanh"),
        (("final", "--seeds", "0,9"), "no run of --seeds 9. Its seeds: 0, 1, 2"),
        (("rate", "--networks", "lstm"), "the stage rate has no --networks. Stages with it: tune,"),
        (("start", "--seeds", "1"), "has no --seeds"),
        (("decay", "--networks", "lsmt"), "unknown network 'lsmt'"),
        (("best-rate", "--rescues", "some"), "unknown rescue 'some'"),
        (("decay", "--networks", "baseline"), "Did you mean 'baselines'"),
        (("decay", "--seeds", "one"), "must be whole numbers with commas between them, got 'one'"),
        (("decay", "--dropouts", "one"), "must be numbers with commas between them, got 'one'"),
        (("decay", "--seconds", "-1"), "must be a positive number of seconds, got -1"),
        (("decay", "--stop", "soon"), "must be a positive number of seconds, got soon"),
        (("decay", "--device", "meta"), "--device must be cpu or cuda, got meta"),
        (("decay", "--known", "nowhere.jsonl"), "No such file"),
        (("decay", "--known", __file__), "line 1 is no record"),
        (("decay", "--processes", "0"), "must be a whole number from 1 on, got 0"),
        (("decay", "--processes", "two"), "must be a whole number from 1 on, got two"),
        (("decay", "--precision", "half"), "invalid choice: 'half'"),
        (("decay", "--dropouts", "2"), "dropout must be above 0 and below 1, got 2.0"),
        (("decay", "--set", "rate=1"), "decay-lstm-dropout0.3-seed0: unknown setting 'rate'"),
        (("decay", "--set", "validation=none"), "--set can't have validation"),
        (("tune", "--networks", "lstm", "--set", "lr=1e-3"), "--set can't have lr"),
        (("tune", "--networks", "lstm", "--set", "final_test=true"), "can't have final_test"),
        (("gate", "--set", " gate = false"), "--set can't have gate"),
        (("rate", "--set", "epochs=1"), "--set can't have epochs"),
        (("rate", "--set", "lr=1e-4"), "--set can't have lr"),
        (
            ("decay", "--networks", "lstm", "--dropouts", "0.3", "--set", "dropout=0.5"),
            "--set can't have dropout",
        ),
        (("start", "--known", str(STARTED)), "start/lstm-1: precision is bfloat16 there"),
        (("gate", "--known", str(STARTED), "--set", "foo=1"), "unknown setting 'foo'"),
    ],
)
def test_a_sweep_that_can_not_run_says_why_and_writes_nothing(
    given, message, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    stage, *options = given
    monkeypatch.setattr("sys.argv", ["sweep", stage, str(out), *options])
    with pytest.raises(SystemExit) as stopped:
        sweep.main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


BEST = {"best": {"value": 1.0}}
CONFIG = {"config": task.settings("nmt/paper", "cwy").to_dict()}
FINAL = {"final": {}, "steps": 1, "seconds": 1.0, "parameters": 1}
ENDED = {"run": "inside", "status": "finished", **CONFIG, **BEST, **FINAL}


def without(record, key):
    return {name: value for name, value in record.items() if name != key}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (ENDED | {"run": "../away"}, "'../away' is not inside of a folder"),
        (ENDED | {"run": "/away"}, "'/away' is not inside of a folder"),
        (ENDED | {"run": "."}, "'.' is not inside of a folder"),
        (without(ENDED, "best"), "must have 'best'"),
        (without(ENDED, "config"), "must have 'config'"),
        (without(ENDED, "status"), "must have 'status'"),
        (without(ENDED, "parameters"), "must have 'parameters'"),
        (ENDED | {"config": {"task": "nmt"}}, "the settings lack recipe"),
        (ENDED | {"status": "ended"}, "'not finished', got 'ended'"),
        (ENDED | {"best": {"value": math.nan}}, "got nan"),
        (ENDED | {"best": {"value": "1.0"}}, "got '1.0'"),
        (ENDED | {"best": None}, "has no best value"),
        ({"run": "inside", "status": "diverged"}, "must have 'method'"),
        (b"\xff", "no text in UTF-8"),
    ],
)
def test_known_records_are_checked_before_anything_is_written(
    record, message, tmp_path, monkeypatch, capsys
):
    known = tmp_path / "known.jsonl"
    content = record
    if isinstance(record, dict):
        content = json.dumps(record).encode()
    known.write_bytes(content)
    given = ["decay", str(tmp_path / "out"), "--known", str(known)]
    monkeypatch.setattr("sys.argv", ["sweep", *given])
    with pytest.raises(SystemExit):
        sweep.main()
    assert message in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == [known]


def test_known_records_do_not_replace_those_of_the_folder(tmp_path):
    run = Planned("inside", "nmt/paper", "cwy", 0)
    (tmp_path / "inside").mkdir()  # by a process that was killed
    others = (ENDED | {"best": {"value": 0.5}}, ENDED | {"status": "diverged"})
    for record in (ENDED, *others):
        known = sweeps.Records(tmp_path, {"inside": record})
        sweeps.restore(known, [run], Place(tmp_path))
    assert sweeps.read(tmp_path, run) == without(ENDED, "run")
    assert sorted(path.name for path in (tmp_path / "inside").iterdir()) == [
        "config.json",
        "record.json",
    ]


def test_lines_of_runs_that_have_ended_stay(tmp_path):
    path = tmp_path / "lines.jsonl"
    run = Planned("inside", "nmt/paper", "cwy", 0, ("lr=1e-3",))
    sweeps.merge(path, [ENDED])
    # Its folder is gone.
    sweeps.merge(path, sweeps.lines(tmp_path, [run]))
    assert sweeps.read_known(path) == {"inside": ENDED}
    diverged = {"run": "inside", "status": "diverged", "method": "cwy", "settings": ["lr=1e-3"]}
    sweeps.merge(path, [diverged | {"commit": "of then"}])
    known = sweeps.Records(tmp_path, sweeps.read_known(path))
    sweeps.restore(known, [run], Place(tmp_path))
    sweeps.merge(path, sweeps.lines(tmp_path, [run]))
    assert sweeps.read_known(path)["inside"]["commit"] == "of then"
    other = replace(run, settings=("lr=1e-4",))
    differing = sweeps.different(known, [other], Place(tmp_path))
    assert "lr is 0.001 there and 0.0001 here" in differing["inside"]


def test_a_search_and_its_stage_with_the_same_settings_agree(pairs, tmp_path, monkeypatch, capsys):
    tiny = [one for one in TINY if not one.startswith("reflections")]
    # The search has other numbers of both for itself.
    shared = (f"file={pairs}", *tiny, "epochs=1", "log_every=10")
    lines = []
    for run in stages.trials(networks.BASELINES[:1]):
        same = replace(run, settings=(*run.settings, *shared))
        config = sweeps.wanted(same, Place(tmp_path)).to_dict()
        lines.append(json.dumps(ENDED | {"run": run.folder, "config": config}))
    known = tmp_path / "known.jsonl"
    known.write_text("\n".join(lines))
    out = tmp_path / "out"
    given = ["final", str(out), "--networks", "lstm", "--known", str(known), "--seconds", "1e-9"]
    monkeypatch.setattr("sys.argv", ["sweep", *given, *(f"--set={one}" for one in shared)])
    for _ in range(2):
        sweep.main()
        assert "Warning" not in capsys.readouterr().err
    assert len(list(out.glob("tuning/*/record.json"))) == networks.POINTS


def test_runs_of_a_search_that_learned_from_different_data_are_refused(tmp_path):
    runs = [Planned(f"run{number}", "nmt/paper", "cwy", 0) for number in range(3)]
    known = {
        run.folder: ENDED | {"run": run.folder, "data": {"sha256": name}}
        for run, name in zip(runs, "aab", strict=True)
    }
    records = sweeps.Records(tmp_path, known)
    sweeps.check_one_data(records, runs[:2])
    with pytest.raises(ConfigError, match="different data, for example run0 and run2"):
        sweeps.check_one_data(records, runs)


def test_a_stage_refuses_a_search_on_different_data(tmp_path, monkeypatch, capsys):
    lines = []
    for number, run in enumerate(stages.trials(networks.BASELINES[:1])):
        config = sweeps.wanted(run, Place(tmp_path)).to_dict()
        data = {"sha256": "a" * (number + 1)}
        lines.append(json.dumps(ENDED | {"run": run.folder, "config": config, "data": data}))
    known = tmp_path / "known.jsonl"
    known.write_text("\n".join(lines))
    given = ["final", str(tmp_path / "out"), "--networks", "lstm", "--known", str(known)]
    monkeypatch.setattr("sys.argv", ["sweep", *given])
    with pytest.raises(SystemExit) as stopped:
        sweep.main()
    assert stopped.value.code == 2
    assert "learned from different data" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_sweeps_in_one_folder_restore_at_once(tmp_path):
    runs = [Planned(f"run{number}", "nmt/paper", "cwy", 0) for number in range(10)]
    known = sweeps.Records(tmp_path, {run.folder: ENDED | {"run": run.folder} for run in runs})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: sweeps.restore(known, runs, Place(tmp_path)), range(8)))
    assert all(sweeps.read(tmp_path, run) == without(ENDED, "run") for run in runs)


@pytest.mark.parametrize(
    ("broken", "content"),
    [
        ("tune.jsonl", '{"run": 3'),
        ("tune.jsonl", "[]"),
        ("tune.jsonl", "[" * 100_000),
        ("tuning/lstm-3/record.json", "{"),
        ("tuning/lstm-3/record.json", '{"config": {}}'),
        (".", "a file where the folder should be"),
    ],
)
@pytest.mark.parametrize("stage", ["tune", "final"])
def test_what_a_sweep_can_not_read_or_write_is_named_before_any_run(
    stage, broken, content, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    path = out / broken.replace("tune", stage)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    known = tmp_path / "known.jsonl"
    (trial, *_) = stages.trials(networks.BASELINES)
    config = sweeps.wanted(trial, Place(out)).to_dict()
    known.write_text(json.dumps(ENDED | {"run": trial.folder, "config": config}))
    given = [stage, str(out), "--networks", "lstm", "--known", str(known)]
    monkeypatch.setattr("sys.argv", ["sweep", *given])
    with pytest.raises(SystemExit) as stopped:
        sweep.main()
    assert stopped.value.code == 2
    assert str(path) in capsys.readouterr().err
    assert path.read_text() == content


@pytest.mark.parametrize("best", [None, {"value": "low"}, {"value": float("nan")}])
def test_a_point_without_a_best_value_is_named(best, tmp_path):
    (network,) = networks.BASELINES[:1]
    (run, *_) = stages.trials([network])
    config = sweeps.wanted(run, Place(tmp_path)).to_dict()
    path = tmp_path / run.folder / "record.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(ENDED | {"config": config, "best": best}))
    with pytest.raises(Damaged, match=re.escape(str(path))):
        stages.losses(sweeps.Records(tmp_path), network, stages.FIRST_SEARCH)


def test_a_warning_names_the_search_whose_point_a_network_takes(tmp_path, capsys):
    def warned(name, network, ended):
        stage = stages.STAGES[name]
        run = f"{stage.search.folder}/{ended}"
        records = sweeps.Records(tmp_path, {run: {"status": "diverged"}})
        chosen = stages.Selection(networks.select(network))
        sweep._warn_of_unfinished(stage, chosen, records)
        return capsys.readouterr().err

    gate = "cwy-256-tanh-gate-thin"
    found = warned("final-decay", "cwy-512-tanh-gate-thin", f"{gate}-0")
    assert f"{gate}: of 10 points of the search 1 have ended" in found
    assert "cwy-128-relu: of 10 points" in warned("final", "cwy-64-relu", "cwy-128-relu-0")
    assert "left out" in warned("final", "lstm", "gru-0")


def test_points_of_a_search_with_other_settings_are_taken_with_a_warning(
    pairs, tmp_path, monkeypatch, capsys
):
    tiny = [one for one in TINY if not one.startswith("reflections")]
    shrunk = [f"--set={one}" for one in (f"file={pairs}", *tiny)]
    trials = stages.trials(networks.BASELINES[:1])
    larger = [f"file={pairs}", *tiny, "hidden_size=9"]
    lines = []
    for run, changed in zip(trials, (tiny, larger), strict=False):
        run = replace(run, settings=(*run.settings, f"file={pairs}", *changed))
        config = sweeps.wanted(run, Place(tmp_path)).to_dict()
        lines.append(json.dumps(ENDED | {"run": run.folder, "config": config}))
    known = tmp_path / "known.jsonl"
    known.write_text("\n".join([*lines, json.dumps(ENDED | {"run": "start/lstm-1"})]))
    out = tmp_path / "out"
    given = ["final", str(out), "--networks", "lstm", "--known", str(known), "--seconds", "1e-9"]
    monkeypatch.setattr("sys.argv", ["sweep", *given, *shrunk])
    sweep.main()
    warned = capsys.readouterr().err
    assert "Runs: 1. The first is tuning/lstm-1: hidden_size is 9 there and" in warned
    restored = {path.parent.relative_to(out).as_posix() for path in out.rglob("record.json")}
    assert restored == {"tuning/lstm-0"}, "others do not belong to this stage, or not to its search"


def test_sweeps_in_one_folder_lose_no_line(tmp_path):
    def merged(number):
        sweeps.merge(tmp_path / "lines.jsonl", [ENDED | {"run": f"run{number}"}])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(merged, range(40)))
    assert len(sweeps.read_known(tmp_path / "lines.jsonl")) == 40


def records_of(stage):
    """The lines of a stage, from every machine that ran a part of it."""
    known = {}
    for path in sorted((RECORDS / "bench").glob(f"*/translation-{stage}.jsonl")):
        known |= sweeps.read_known(path)
    return known


def recorded(stage):
    """The settings of each run of a stage by its place, as its record has them."""
    known = records_of(stage)
    if known:
        return {run: one["config"] for run, one in known.items() if one["status"] == "finished"}
    start = {"final": "tuned-", "decay": "decay-", "final-decay": "tuned-decay-"}[stage]
    return {
        f"nmt/{folder.name}": json.loads((folder / "record.json").read_text())["config"]
        for folder in sorted((RECORDS / "nmt").glob(f"{start}*"))
        if stage == "final-decay" or not folder.name.startswith("tuned-decay-")
    }


def test_each_stage_plans_the_runs_of_the_records(tmp_path):
    known = {}
    for stage in stages.STAGES:
        known |= records_of(stage)
    records = sweeps.Records(tmp_path, known)
    for name, stage in stages.STAGES.items():
        chosen = stages.Selection()
        if stage.search is not None:
            # A run that diverged has ended, too.
            assert stages.unfinished(records, stage.searched, stage.search) == []
            points = stages.best_points(records, stage.searched, stage.search)
            chosen = stages.Selection(points=points)
        runs = stage.plan(chosen)
        planned = {run.folder: run for run in runs}
        # Those that diverged have no such record, and are compared here.
        sweeps.check_known(known, runs, Place(tmp_path, precision="bfloat16"))
        found = recorded(name)
        assert found
        if records_of(name) and "rescues" not in stage.options:
            assert planned.keys() == records_of(name).keys(), "each run that is planned has ended"
        for folder, config in found.items():
            run = planned[folder]
            mine = task.settings(run.what, run.method, run.seed, run.settings).to_dict()
            # How a run is computed, and what it saves, is not what is compared.
            for key in ("device", "precision", "recipe", "save_every", "log_every"):
                del config[key]
            assert config == {key: mine[key] for key in config}, folder


def test_a_stage_keeps_its_other_runs_and_reports_failures(pairs, tmp_path, monkeypatch, capsys):
    def run(seed, *options):
        tiny = [one for one in TINY if not one.startswith("reflections")]
        settings = [f"--set={one}" for one in (f"file={pairs}", *tiny)]
        given = ["decay", str(tmp_path), "--networks", "lstm", "--dropouts", "0.3"]
        monkeypatch.setattr("sys.argv", ["sweep", *given, "--seeds", seed, *settings, *options])
        sweep.main()
        return [json.loads(line) for line in (tmp_path / "decay.jsonl").read_text().splitlines()]

    assert [line["seed"] for line in run("0")] == [0]
    found = run("1")
    assert [(line["seed"], line["status"]) for line in found] == [(0, "finished"), (1, "finished")]
    with pytest.raises(SystemExit, match="runs that failed: 1"):
        run("1", "--set=lr=1e-4")
    assert "goes on" not in capsys.readouterr().err, "the same command would fail again"


@pytest.mark.gpu
def test_steps_are_timed_for_each_frequent_length(pairs):
    tiny = (f"file={pairs}", *TINY)
    network = replace(networks.BASELINES[0], settings=tiny)
    found = speed.measure(network, "bfloat16")
    assert sum(one["batches"] for one in found["lengths"]) <= found["batches"]
    for key in ("plain_ms", "graph_ms"):
        times = [one[key] for one in found["lengths"]]
        assert 0 < min(times) <= found[key] <= max(times)
    assert found["versions"]["torch"] == torch.__version__
