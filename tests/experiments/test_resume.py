"""A run stopped at any moment and resumed is the run that was never stopped."""

import fcntl
import json
import os
import pty
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from cwy.experiments.engine import checkpoint, task
from cwy.experiments.engine.config import ConfigError
from cwy.experiments.engine.folder import Folder
from cwy.experiments.engine.listing import table
from cwy.experiments.engine.runner import RunError
from cwy.experiments.engine.signals import Stop, Stopped
from tests.helpers.cli import ENV, program, start
from tests.helpers.runs import arguments, loop, numbers, resume, rows, same, train, until, weights

pytestmark = pytest.mark.slow


def test_stopped_and_resumed_equals_never_stopped(whole, tmp_path):
    run = tmp_path / "run"
    process = start(*arguments(run))
    for step, how in (50, signal.SIGTERM), (120, signal.SIGKILL), (190, signal.SIGINT):
        until(process, run, step)
        process.send_signal(how)
        _, error = process.communicate(timeout=10)
        saved = "and saved" in error
        assert (process.returncode, saved) == (
            (-how, False) if how == signal.SIGKILL else (128 + how, True)
        ), error
        process = start("resume", run)
    _, error = process.communicate()
    assert process.returncode == 0, error
    assert same(weights(run), weights(whole))
    assert same(weights(run, "best.safetensors"), weights(whole, "best.safetensors"))
    assert numbers(run) == numbers(whole)
    states = [
        checkpoint.parse(checkpoint.last(folder / "checkpoints", print)) for folder in (run, whole)
    ]
    parts = [
        (one["model"], one["optimizer"]["state"], one["meter"]["sums"], one["random"])
        for one in states
    ]
    torch.testing.assert_close(*parts, rtol=0, atol=0)
    first, second = (json.loads((folder / "record.json").read_text()) for folder in (run, whole))
    assert [first[key] for key in ("steps", "best", "crossings")] == [
        second[key] for key in ("steps", "best", "crossings")
    ]


@pytest.mark.parametrize(
    ("env", "last"),
    [({}, "copying/small cwy"), ({"FORCE_COLOR": "1"}, "0/300")],
    ids=["lines", "bar"],
)
def test_a_run_outlives_whoever_reads_what_it_prints(env, last, whole, tmp_path):
    run, printed = tmp_path / "run", ""
    process = start(*arguments(run), **env)
    while last not in printed:
        printed += process.stdout.read(1) or pytest.fail(printed)
    process.stdout.close()
    assert process.wait(60) == 0
    assert (
        process.stderr.read()
        == "cwy: cannot print any more (Broken pipe). The run goes on without.\n"
    )
    assert same(weights(run), weights(whole))


@contextmanager
def in_a_terminal(*args):
    """A process, and our end of its terminal, which is closed in the end."""
    ours, theirs = pty.openpty()

    def own():
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run below nohup

    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = subprocess.Popen(
        [*program(1), *map(str, args)], env=ENV, start_new_session=True, preexec_fn=own, **streams
    )
    os.close(theirs)
    yield process, ours
    os.close(ours)


def test_a_closed_terminal_stops_a_run_and_saves_it_unless_below_nohup(tmp_path):
    run = tmp_path / "run"
    with in_a_terminal(*arguments(run, iterations=10000)) as (process, _):
        until(process, run, 50)
    assert process.wait(10) == 128 + signal.SIGHUP
    saved = checkpoint.parse(checkpoint.last(run / "checkpoints", print))["run"]["step"]
    assert max(row["step"] for row in rows(run)) <= saved
    # Ignored, as by nohup and by a shell's background, they stay so.
    ignored = (signal.SIGHUP, signal.SIGINT)
    process = start(
        "resume",
        run,
        preexec_fn=lambda: [signal.signal(number, signal.SIG_IGN) for number in ignored],
    )
    until(process, run, saved + 5)
    for number in ignored:
        process.send_signal(number)
    until(process, run, max(row["step"] for row in rows(run)) + 100)
    process.terminate()
    _, error = process.communicate(timeout=10)
    assert (process.returncode, "and saved" in error) == (128 + signal.SIGTERM, True), error


def test_a_demo_ends_with_its_terminal(tmp_path):
    with in_a_terminal("demo", "--out", tmp_path / "demo") as (process, ours):
        seen = b""
        while b"symbols" not in seen:
            seen += os.read(ours, 1000)
    assert process.wait(20) == 128 + signal.SIGHUP


def test_a_pipe_that_is_full_and_does_not_wait_is_waited_for(tmp_path):
    run = tmp_path / "run"
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    command = [*program(1), *map(str, arguments(run, iterations=20))]
    process = subprocess.Popen(command, env=ENV, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    while not (run / "config.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    with open(reading, "rb") as read:
        assert b"Finished" in read.read()
    assert (process.wait(20), process.stderr.read()) == (0, "")


def test_what_another_process_did_in_the_meantime_is_left_alone(tmp_path):
    run = tmp_path / "run"
    others = loop(run, lr=1e-4, iterations=20), loop(run, iterations=20)
    assert train(run, iterations=20)[0] == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for other in others:
        with pytest.raises(ConfigError, match="another process has just been at the run"):
            other.run()
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("dtriv", {"base_every": 3}),
        ("dtriv", {"base_every": 4, "optimizer": "adam"}),
        ("urnn", {"optimizer": "adam"}),
        ("cwy", {"reflections": 3, "nonlinearity": "abs"}),
        ("lstm", {"optimizer": "sgd"}),
    ],
)
def test_every_kind_of_state_is_remembered(method, settings, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    settings = settings | {"iterations": 20, "lr": 1e-2, "orthogonal_lr": 1e-2}
    assert train(whole, (method,), **settings)[0] == 0
    stop, stopped = Stop(), loop(run, method, **settings)
    # Asked to stop amid the backward of step 9.
    stopped.model.readout.bias.register_hook(
        lambda g: setattr(stop, "signal", 15 if stopped.step == 8 else 0)
    )
    with pytest.raises(Stopped, match="stopped at step 9, and saved"):
        stopped.run(stop)
    assert "9" in table(run).columns[2].cells  # its log ends at 5
    assert resume(run)[0] == 0
    assert same(weights(run), weights(whole))
    assert numbers(run) == numbers(whole)


@pytest.mark.parametrize("step", [20, 40])
def test_a_signal_amid_an_evaluation_does_not_wait_for_its_end(step, tmp_path):
    whole, run, settings = (
        tmp_path / "whole",
        tmp_path / "run",
        {"iterations": 40, "save_every": 100},
    )
    assert train(whole, **settings)[0] == 0
    stop, stopped = Stop(), loop(run, **settings)

    def ask(model, *_):
        if stopped.step == step and not model.training:
            signal.raise_signal(signal.SIGTERM)

    stopped.model.register_forward_hook(ask)
    with stop, pytest.raises(Stopped, match=rf"\b{step}\b"):
        stopped.run(stop)
    assert rows(run)[-1]["split"] == "train"
    # It goes on with that evaluation, and ends again before the next checkpoint.
    killed = loop(run, **settings)
    killed.model.readout.bias.register_hook(lambda g: g if killed.step < 25 else 1 / 0)
    if step < 25:
        with pytest.raises(ZeroDivisionError):
            killed.run()
        assert rows(run)[-1]["step"] == 25
    assert resume(run)[0] == 0
    assert numbers(run) == numbers(whole)
    assert same(weights(run), weights(whole))
    assert same(weights(run, "best.safetensors"), weights(whole, "best.safetensors"))


def test_the_best_state_is_the_one_that_the_record_names(tmp_path):
    run, settings = tmp_path / "run", {"evaluate_every": 10, "save_every": 15}
    assert train(tmp_path / "short", iterations=10, **settings)[0] == 0
    killed = loop(run, iterations=40, **settings)
    killed.model.readout.bias.register_hook(lambda g: g if killed.step < 25 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        killed.run()
    # What comes again need not be what it was, as on a GPU: here step 20, the best before, is
    # worse than step 10.
    again = loop(run, iterations=40, **settings)
    again.model.register_forward_hook(lambda model, _, out: out if model.training else -10 * out)
    assert again.run()["best"]["step"] == 10
    assert same(weights(run, "best.safetensors"), weights(tmp_path / "short"))


def test_resume_restarts_a_run_without_checkpoint_and_leaves_a_finished_one(whole, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text((whole / "config.json").read_text())
    (run / "metrics.jsonl").write_text(
        '{"step": 5, "split": "train", "seconds": 1, "loss": 1}\n{"step": 10, "spl'
    )
    assert resume(run)[0] == 0
    assert numbers(run) == numbers(whole)
    assert same(weights(run), weights(whole))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    status, said = resume(run)
    assert (status, "is finished" in said) == (0, True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_without_its_device_a_run_is_only_left_alone_if_it_has_finished(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    config = run / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"device": "cuda:77"}))
    status, said = resume(run)
    assert (status, said) == (0, f"{run} is finished: nothing to do.\n")
    (run / "record.json").unlink()
    before = sorted(run.rglob("*"))
    with pytest.raises(ConfigError) as refused:
        resume(run)
    assert str(refused.value).startswith(f"{config} has device cuda:77, which can't be used here: ")
    command = f" To go on with another one: cwy resume {run} --device cpu"
    assert str(refused.value).endswith(command)
    with pytest.raises(ConfigError, match=r"^--device cuda:78 can't be used: "):
        resume(run, "cuda:78")
    assert sorted(run.rglob("*")) == before
    assert resume(run, "cpu")[0] == 0


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_a_run_of_a_gpu_goes_on_elsewhere(optimizer, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert train(whole, iterations=20, optimizer=optimizer)[0] == 0
    shutil.copytree(whole, run)
    (run / "record.json").unlink()
    path = Folder(run).last_checkpoint()
    state = checkpoint.parse(path.read_bytes())
    for group in state["optimizer"]["param_groups"]:
        # As a GPU leaves it: its steps are recorded in a graph, and those of Adam are fused.
        group |= {
            "capturable": True,
            **({"fused": True, "foreach": None} if optimizer == "adam" else {}),
        }
    path.unlink()
    checkpoint.save(path.parent, 14, state)
    assert resume(run)[0] == 0
    assert same(weights(run), weights(whole))


def test_tensorboard_shows_every_step_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, ended = tmp_path / "run", loop(tmp_path / "run", iterations=20, save_every=100)
    ended.model.readout.bias.register_hook(lambda g: None if ended.step < 12 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ended.run()
    assert resume(run)[0] == 0
    shown = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in shown.Scalars("train/loss")] == [5, 10, 15, 20]


@pytest.mark.parametrize(
    ("name", "error"), [("config.json", ConfigError), ("metrics.jsonl", RunError)]
)
def test_a_damaged_file_is_named(name, error, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "record.json").unlink()
    content = (run / name).read_bytes()
    (run / name).write_bytes(b"\0" + content[1:])
    with pytest.raises(error, match=f"{name} is damaged"):
        resume(run)
    assert (run / name).read_bytes() == b"\0" + content[1:]
    assert list(table(run).columns[-1].cells) == ["damaged"]


def test_no_run_goes_on_as_another(tmp_path):
    run = tmp_path / "run"
    stop, stopped = Stop(), loop(run, iterations=20)
    stopped.model.readout.bias.register_hook(
        lambda g: setattr(stop, "signal", 15 if stopped.step == 8 else 0)
    )
    with pytest.raises(Stopped, match=f"To go on: cwy resume {run}"):
        stopped.run(stop)
    config, before = run / "config.json", (run / "metrics.jsonl").read_bytes()
    content = config.read_text()
    changed = json.loads(content)
    config.write_text(json.dumps(changed | {"lr": 0.5, "seed": changed["seed"] + 1}))
    with pytest.raises(
        RunError,
        match=r"not that of its checkpoints: seed is 0 there and 1 here, lr is 0\.001",
    ):
        resume(run)
    config.unlink()
    with pytest.raises(RunError, match=r"parts of a run, but not its config\.json"):
        train(run, iterations=20)
    with pytest.raises(ConfigError, match="is not a run folder"):
        resume(run / "metrics.jsonl")
    assert (run / "metrics.jsonl").read_bytes() == before
    config.write_text(content)
    assert resume(run)[0] == 0
    (run / "record.json").write_text("")
    with pytest.raises(RunError, match=r"record\.json is damaged.*delete it"):
        resume(run)


def test_the_log_has_every_step_once(whole):
    steps = [(row["split"], row["step"]) for row in rows(whole)]
    assert [step for split, step in steps if split == "train"] == list(range(5, 301, 5))
    assert [step for split, step in steps if split == "test"] == list(range(20, 301, 20))
    assert all(row["orthogonality_error"] < 1e-5 for row in rows(whole) if row["split"] == "train")


def test_a_signal_while_data_are_fetched_leaves_a_run_that_resume_starts(tmp_path):
    run = tmp_path / "run"
    # A server that takes every call and never answers: MNIST does not come.
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        env = {
            "CWY_DATA": str(tmp_path / "data"),
            "https_proxy": f"http://127.0.0.1:{server.getsockname()[1]}",
            "no_proxy": "",
        }
        for how, call in (
            (signal.SIGTERM, ("train", "mnist/small", "--out", run)),
            (signal.SIGINT, ("resume", run)),
        ):
            process = start(*call, **env)
            with server.accept()[0]:
                process.send_signal(how)
                out, error = process.communicate(timeout=10)
            told = f"cwy: stopped before its first step. To go on: cwy resume {run}\n"
            assert (process.returncode, out, error) == (128 + how, "", told)
            assert sorted(path.name for path in run.iterdir()) == [".lock", "config.json"]
    assert Folder(run).settings() == task.settings("mnist/small")


@pytest.mark.parametrize(
    "amid",
    [
        # What is raised here Python 3.11 replaces,
        "type('Owner', (), {'field': type('Field', (), {'__set_name__': ask})()})",
        # and here any drops,
        "weakref.finalize(type('Gone', (), {})(), ask)",
        # and here no other line can be printed.
        "raw = type('Raw', (io.FileIO,), {'write': ask})(2, 'w')\n"
        "sys.stderr = io.TextIOWrapper(io.BufferedWriter(raw))\n"
        "print('a line', file=sys.stderr, flush=True)",
    ],
    ids=["class", "callback", "write"],
)
def test_a_signal_amid_an_import_ends_plainly(amid, tmp_path):
    asking = (
        "import io, signal, sys, weakref\ndef ask(*_):\n    signal.raise_signal(signal.SIGTERM)\n"
    )
    (tmp_path / "asking.py").write_text(f"{asking}{amid}\nraise SystemExit('went on')\n")
    program = (
        "from cwy.experiments.engine.signals import Stop\n"
        "with Stop() as stop, stop.ending(lambda: 'left.'): import asking"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=ENV, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "cwy: left.\n")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_signal_at_any_moment_before_the_first_step_ends_plainly(whole, tmp_path):
    chance, run = random.Random(0), tmp_path / "run"
    for _ in range(4):
        process = start(*(("resume", run) if run.exists() else arguments(run)))
        # Its own handler stands in the place of Python's.
        while (
            int(
                re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())[1],
                16,
            )
            >> 14
            & 1
            == 0
        ):
            assert process.poll() is None, process.communicate()
        time.sleep(chance.uniform(0, 2))
        process.terminate()
        _, error = process.communicate(timeout=10)
        stopped = re.fullmatch(
            r"cwy: stopped (before anything was done\.|.* To go on: cwy resume .*)\n", error
        )
        late = (
            process.returncode == -signal.SIGTERM and (run / "record.json").exists()
        )  # the run was over, Python not yet
        assert late or (process.returncode, bool(stopped)) in ((143, True), (0, False)), error
    assert (resume(run) if run.exists() else train(run))[0] == 0
    assert same(weights(run), weights(whole))
    assert numbers(run) == numbers(whole)


def test_the_second_signal_ends_at_once(tmp_path):
    # A step takes far longer than the signals are apart.
    run = tmp_path / "run"
    process = start(
        *arguments(
            run,
            T=6000,
            hidden_size=64,
            batch_size=64,
            log_every=1,
            evaluate_every=2000,
            save_every=1000,
        )
    )
    until(process, run, 1)
    with pytest.raises(RunError, match="another process is at the run"):
        resume(run)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=10)
    assert process.returncode in (128 + signal.SIGTERM, 128 + signal.SIGINT)
    assert "saved" not in error
    assert not list(run.glob("checkpoints/*.pt"))
