"""Run folders from a stranger: links, forged fields, escape codes. Nothing is written elsewhere, nothing ends in a traceback."""

import sys

import pytest

from cwy.experiments.engine.command import RunError
from cwy.experiments.report import find_runs, write

from .process import resume, same, weights

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")


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
