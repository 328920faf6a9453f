"""The record of CPU times: steps that were measured, times the steps of the run."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from cwy.experiments import pace
from cwy.experiments.engine.task import settings

RECORD = Path(__file__).parents[2] / "results" / "bench" / "cpu-2-threads" / "pace.jsonl"


def test_a_run_takes_its_steps_times_a_measured_step():
    found = pace.measure(settings("copying/small", "cwy", 3, ("T=5", "iterations=40")))
    assert found["run"] == "copying/small cwy"
    assert len(found["step_ms"]) == pace.BATCHES
    assert found["seconds"] == pytest.approx(mean(found["step_ms"]) / 1e3 * 40, rel=0.05)
    assert (found["seed"], found["config"]["T"]) == (3, 5)
    assert found["device"]
    assert found["versions"]["torch"]


@pytest.mark.slow
def test_the_command_replaces_only_the_runs_that_it_measures(tmp_path):
    path = tmp_path / "pace.jsonl"
    path.write_text('{"run": "adding/small cwy"}\n{"run": "other"}\n')
    command = [sys.executable, "-m", "cwy.experiments.pace", str(path), "adding/small"]
    subprocess.run(command, check=True)
    lines = {one["run"]: one for one in map(json.loads, path.read_text().splitlines())}
    assert lines["other"] == {"run": "other"}
    assert lines["adding/small cwy"]["threads"] == 1
    assert str(path) in lines["adding/small cwy"]["command"]


def test_the_record_has_every_run():
    recorded = [json.loads(line) for line in RECORD.read_text().splitlines()]
    chosen = [settings(one.recipe, one.method, 0, one.assignments) for one in pace.RUNS]
    names = {f"{one.task}/{one.recipe} {one.method}" for one in chosen}
    assert {one["run"] for one in recorded} == names
    assert not any(one["dirty"] for one in recorded)
