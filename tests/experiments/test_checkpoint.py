"""Checkpoints: killed, flipped, cut short, on a full disk."""

import io
import json
import multiprocessing
import os
import random
import resource
import shlex
import shutil
import subprocess
import sys
import time
from copy import deepcopy
from itertools import product
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from cwy.experiments.engine import checkpoint
from cwy.experiments.engine.display import Display
from cwy.experiments.engine.folder import read_weights
from cwy.experiments.engine.monitor import Diverged
from cwy.experiments.engine.runner import RunError
from tests.helpers.cli import ENV, cwy, program
from tests.helpers.errors import assert_one_line
from tests.helpers.runs import arguments, loop, numbers, resume, same, weights

pytestmark = pytest.mark.slow


def saver(folder, step):
    while True:
        checkpoint.save(folder, step, {"step": step, "model": torch.full((200_000,), float(step))})
        step += 1


def test_a_kill_at_any_moment_of_saving_leaves_a_whole_checkpoint(tmp_path):
    chance, step = random.Random(0), 0
    checkpoint.save(tmp_path, step, {"step": 0, "model": torch.zeros(200_000)})
    for _ in range(30):
        process = multiprocessing.get_context("fork").Process(
            target=saver, args=(tmp_path, step + 1)
        )
        process.start()
        time.sleep(chance.uniform(0.02, 0.08))
        process.kill()
        process.join()
        complaints = []
        state = checkpoint.parse(checkpoint.last(tmp_path, complaints.append))
        assert complaints == []
        assert state["step"] >= step
        assert torch.equal(state["model"], torch.full((200_000,), float(state["step"])))
        step = state["step"]
    assert step > 30
    checkpoint.save(tmp_path, step + 1, {})
    assert len(checkpoint.listed(tmp_path)) == checkpoint.KEEP


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "a flipped bit": flip,
    "cut short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "without its hash": lambda path: path.with_name(f"{path.name}.sha256").unlink(),
    "with an empty hash": lambda path: os.truncate(path.with_name(f"{path.name}.sha256"), 0),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(damage, tmp_path):
    first, second = (checkpoint.save(tmp_path, step, {"step": step}) for step in (1, 2))
    damage(second)
    complaints = []
    assert checkpoint.parse(checkpoint.last(tmp_path, complaints.append))["step"] == 1
    assert len(complaints) == 1
    assert str(second) in complaints[0]
    damage(first)
    with pytest.raises(checkpoint.Damaged, match=r"no checkpoint in .* is whole"):
        checkpoint.last(tmp_path, complaints.append)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    checkpoint.save(tmp_path, 1, {"model": Evil()})
    with pytest.raises(checkpoint.Damaged, match="can't be read"):
        checkpoint.parse(checkpoint.last(tmp_path, print))
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def saved(whole, tmp_path):
    """A run that has come to its last checkpoint, and that checkpoint's state."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "record.json").unlink()
    newest, before = checkpoint.listed(run / "checkpoints")
    state = checkpoint.parse(checkpoint.read(newest))
    newest.unlink()
    return run, before, state


def forge(before, state):
    """Saves a state with the right hash, as the only checkpoint."""
    shutil.rmtree(before.parent)
    checkpoint.save(before.parent, 294, state)


@pytest.mark.parametrize("step", [-5, 10**9, 301, "294", True, None, 2.5])
def test_a_checkpoint_of_a_step_that_the_run_does_not_have_is_refused(step, saved):
    run, before, state = saved
    state["run"]["step"] = step
    forge(before, state)
    log = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match=r"does not fit this run.*step"):
        resume(run)
    assert (run / "metrics.jsonl").read_bytes() == log


def test_weights_of_other_shapes_are_of_another_version(saved):
    run, before, state = saved
    state["model"]["readout.weight"] = torch.zeros(12, 9)
    forge(before, state)
    with pytest.raises(RunError, match=r"another version.*weight is \(12, 9\), and .* \(9, 12\)"):
        resume(run)
    assert checkpoint.listed(before.parent)


def test_a_setting_that_an_earlier_version_lacked_has_its_default(saved):
    run, before, state = saved
    config = json.loads((run / "config.json").read_text())
    for settings in (state["run"]["settings"], config):
        del settings["alpha"]
    forge(before, state)
    (run / "config.json").write_text(json.dumps(config))
    assert resume(run)[0] == 0


def leaves(state, path=()):
    """The place of every value in a nest, and of its parts."""
    items = (
        state.items()
        if isinstance(state, dict)
        else enumerate(state)
        if isinstance(state, list)
        else ()
    )
    for key, value in items:
        yield (*path, key)
        yield from leaves(value, (*path, key))


FORGED = [
    None,
    "x",
    -5,
    float("nan"),
    {},
    [],
    torch.zeros(2, 3),
    torch.full((12,), torch.nan),
    torch.zeros(1, dtype=torch.complex64),
]


def test_a_forged_checkpoint_ends_in_a_sentence_or_is_one_of_the_run(saved):
    run, before, state = saved
    places = [place for place in leaves(state) if place[:2] != ("run", "settings")]
    refused = 0
    # Every eleventh: each value meets many places, and each kind of place many values.
    for place, value in list(product(places, FORGED))[::11]:
        forged = deepcopy(state)
        inside = forged
        for key in place[:-1]:
            inside = inside[key]
        inside[place[-1]] = value
        forge(before, forged)
        try:
            assert resume(run)[0] == 0
            (run / "record.json").unlink()
        except (RunError, Diverged):
            refused += 1
    assert refused > 50


def test_weights_are_hashed_and_those_of_before_still_load(whole, tmp_path):
    for name in ("weights.safetensors", "best.safetensors"):
        path = tmp_path / name
        content = bytearray((whole / name).read_bytes())
        path.write_bytes(content)
        assert same(read_weights(path), weights(whole, name))
        content[-1] ^= 1
        path.write_bytes(content)
        with pytest.raises(
            checkpoint.Damaged, match=f"{name} is damaged: its weights are not those of its hash"
        ):
            read_weights(path)
        # Another name for the same numbers.
        path.write_bytes((whole / name).read_bytes().replace(b"readout.bias", b"readout.bios"))
        with pytest.raises(checkpoint.Damaged, match="hash"):
            read_weights(path)
        save_file(weights(whole, name), path, {"complex": "[]"})
        assert same(read_weights(path), weights(whole, name))


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_or_a_full_disk(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for name in ("record.json", "weights.safetensors", "best.safetensors"):
        (run / name).unlink()
    newest, before = checkpoint.listed(run / "checkpoints")
    flip(newest)
    # As on a full disk: a file of the size of a checkpoint is refused.
    size = before.stat().st_size - 1000
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    full = cwy("resume", run, preexec_fn=limit)
    assert str(newest) in full.stdout
    message = f"{run}: File too large. To go on from its last checkpoint: cwy resume {run}"
    assert_one_line(full, message, stdout=None)
    assert checkpoint.listed(run / "checkpoints") == [before]
    assert checkpoint.parse(checkpoint.read(before))["run"]["step"] == 287
    assert not list(run.rglob("*.partial"))
    assert resume(run)[0] == 0
    assert same(weights(run), weights(whole))
    assert numbers(run) == numbers(whole)


def mounted(size, *lines):
    """Runs shell lines beside a disk of this size, $DISK, which nobody else sees; needs a kernel
    that lets users mount.
    """
    script = "\n".join(["set -e", f"mount -t tmpfs -o size={size} none $DISK", *lines])
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]


CAN_MOUNT = (
    shutil.which("unshare")
    and not subprocess.run(
        mounted("4k"), env=ENV | {"DISK": "/mnt"}, capture_output=True
    ).returncode
)


@pytest.mark.skipif(not CAN_MOUNT, reason="needs to mount a small disk")
def test_a_disk_that_fills_up_leaves_whole_checkpoints_from_which_the_run_goes_on(whole, tmp_path):
    disk, command = tmp_path / "disk", shlex.join([*program(1), *arguments(tmp_path / "disk/run")])
    disk.mkdir()
    again = shlex.join([*program(1), "resume", str(disk / "run")])
    # Room for two checkpoints, and for a while of the log.
    lines = (
        f"{command} && exit 99 || test $? = 1",
        f"cp -r $DISK/run {tmp_path}/full",
        "mount -o remount,size=10m $DISK",
        again,
        f"cp -r $DISK/run {tmp_path}/run",
    )
    done = subprocess.run(
        mounted("80k", *lines), env=ENV | {"DISK": str(disk)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        f"cwy: cannot write to the folder {disk / 'run'}: No space left on device. "
        f"To go on from its last checkpoint: cwy resume {disk / 'run'}\n"
    )
    complaints = []
    assert checkpoint.last(tmp_path / "full/checkpoints", complaints.append)
    assert complaints == []
    assert not list((tmp_path / "full").rglob("*.partial"))
    assert same(weights(tmp_path / "run"), weights(whole))
    assert numbers(tmp_path / "run") == numbers(whole)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /sys, which not even root can write to")
def test_a_folder_that_cannot_be_written_is_named_and_nothing_is_left(tmp_path):
    (tmp_path / "file").touch()
    for out in Path("/sys/cwy/run"), tmp_path / "file" / "run":
        done = cwy(*arguments(out))
        assert_one_line(done, f"cannot write to the folder {out}")
        assert not out.parent.is_dir()
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


def test_a_step_to_infinity_reaches_no_file(tmp_path):
    done = cwy(*arguments(tmp_path / "run", lr=1e38, save_every=1))
    assert done.returncode == 3
    assert (
        "is not finite after step 1: the run is stopped. There is no checkpoint yet." in done.stderr
    )
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        ".lock",
        "config.json",
        "diverged.txt",
        "metrics.jsonl",
        "tensorboard",
    ]


@pytest.mark.parametrize(
    ("size", "told"), [(1e-3, "Warning: the orthogonality error after step 5 is"), (1e-1, None)]
)
def test_a_weight_that_is_not_orthogonal_is_told_or_stops_the_run(size, told, tmp_path):
    console = Console(file=io.StringIO(), width=200)
    run = loop(tmp_path / "run", iterations=5)
    run.display = Display(console)
    chart = run.model.core.parametrizations.weight_hh_l0[0]
    chart.register_forward_hook(lambda chart, given, weight: weight * (1 + size))
    if told:
        run.run()
        assert told in console.file.getvalue()
    else:
        with pytest.raises(
            Diverged, match=r"the orthogonality error after step 5 is 2\.1e-01, above 1e-02"
        ):
            run.run()
