"""``cwy info``: what it tells is what is here."""

import json
import subprocess
import sys

import pytest
import torch

import cwy
from cwy import _provenance, info
from cwy.ops import dispatch
from tests.helpers.cli import COMMAND, run


def test_json_lists_every_method_and_backend():
    done = run(COMMAND, "info", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["versions"]["torch"] == torch.__version__
    assert set(_provenance.OPTIONAL) < set(found["versions"])
    assert [row["name"] for row in found["methods"]] == list(cwy.METHODS)
    on_cpu = [row for row in found["backends"] if row["device"] == "cpu"]
    every = [
        (op, backend.name)
        for op, candidates in dispatch.backends().items()
        for backend in candidates
    ]
    assert [(row["op"], row["backend"]) for row in on_cpu] == every
    assert sorted(row["op"] for row in on_cpu if row["status"] == "serves") == sorted(
        dispatch.backends()
    )


def test_tables_hold_everything_in_80_columns():
    done = run(COMMAND, "info")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert {cwy.__version__, "cpu", *cwy.METHODS, *dispatch.backends()} <= set(words)
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_choice_for_one_recurrence_gives_the_reasons():
    rows = {
        row["backend"]: row
        for row in info.rollout(1024, reflections=128, batch=64, nonlinearity="relu", device="cuda")
    }
    assert rows["cudnn"]["status"] == "not here"
    assert "formed transition, not factors" in rows["cudnn"]["why"]
    assert rows["torch"]["status"] in (
        ("serves", "ready") if torch.cuda.is_available() else ("would serve",)
    )
    rows = {row["backend"]: row for row in info.rollout(190, nonlinearity="modrelu", device="cuda")}
    assert "it has relu and tanh, not modrelu" in rows["cudnn"]["why"]
    with pytest.raises(ValueError, match="unknown nonlinearity"):
        info.rollout(190, nonlinearity="gelu")


@pytest.mark.parametrize("kinds", [["cpu"], pytest.param(["cpu", "cuda"], marks=pytest.mark.gpu)])
def test_one_recurrence_is_answered_for_every_device_here(kinds):
    done = run(sys.executable, "-m", "cwy", "info", "--n", "190", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["backends"]
    assert list(dict.fromkeys(row["device"] for row in rows)) == info.usable()
    assert set(kinds) <= set(info.usable())
    assert [row["device"] for row in rows if row["status"] == "serves"] == info.usable()


@pytest.mark.parametrize(
    ("given", "named"),
    [({"device": "foo"}, "device 'foo'"), ({"dtype": torch.int32}, "torch.int32")],
    ids=["device", "dtype"],
)
def test_a_device_or_dtype_that_nobody_has_is_refused(given, named):
    with pytest.raises(ValueError, match=named):
        info.rollout(190, **given)


def test_it_needs_torch_alone():
    code = (
        "import sys, cwy.info; cwy.info.gather(); "
        "print({'typer', 'rich', 'matplotlib'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
