"""cwy train and cwy runs: sweeps, methods, mistakes, and curves that stay as they are."""

import io
import json
import re
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from rich.console import Console

import cwy
from cwy.experiments.engine import task
from cwy.experiments.engine.config import ConfigError
from cwy.experiments.engine.display import Display
from cwy.experiments.engine.distributed import Group
from cwy.experiments.engine.folder import Folder
from cwy.experiments.engine.listing import meanings, recipes, table
from cwy.experiments.engine.loop import Loop
from cwy.experiments.engine.runner import RunError
from tests.helpers.cli import cwy as run
from tests.helpers.cli import program
from tests.helpers.errors import assert_one_line
from tests.helpers.runs import arguments, numbers, rows, same, train, weights
from tests.helpers.screen import watch

RESULTS = Path(__file__).parents[2] / "results"

# Training losses of 50 steps, means of ten, as they were when this was written (torch 2.13, CPU,
# float32).
GOLDEN = {
    "copying": [4.008653866, 2.170583899, 1.482083349, 1.148819936, 0.981481028],
    "adding": [0.322495617, 0.139375318, 0.123173138, 0.125301747, 0.115142194],
}


def test_a_sweep_makes_one_folder_a_run_skips_the_finished_and_tells_of_failures(tmp_path):
    settings = {"iterations": 10, "log_every": 5, "reflections": 4}
    status, said = train(tmp_path, ("cwy", "exprnn"), (0, 1), **settings)
    assert status == 1
    assert (
        "small-exprnn-L4-seed0 failed: reflections is a setting of methods such as cwy, and exprnn"
        in said
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "small-cwy-L4-seed0",
        "small-cwy-L4-seed1",
    ]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    status, said = train(tmp_path, ("cwy",), (0, 1), **settings)
    assert (status, said.count("is finished: nothing to do")) == (0, 2)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert not same(*(weights(tmp_path / f"small-cwy-L4-seed{seed}") for seed in (0, 1)))

    table = run("runs", tmp_path)
    assert table.returncode == 0
    assert [line.split()[:3] for line in table.stdout.splitlines() if "seed" in line] == [
        ["small-cwy-L4-seed0", "cwy", "10"],
        ["small-cwy-L4-seed1", "cwy", "10"],
    ]


@pytest.mark.skipif(not RESULTS.exists(), reason="needs the records of the repository")
def test_80_columns_hold_every_run_with_its_measure_and_break_no_word():
    console = Console(file=io.StringIO(), width=80)
    console.print(table(RESULTS, console.width))
    lines = console.file.getvalue().splitlines()[2:]
    assert max(map(len, lines)) <= 80
    names, rest = [], []
    for line in lines:
        part, *cells = line.split()
        if cells:
            names.append(part)
            rest.append(line)
        else:
            assert names[-1][-1] in "-/", "a name is broken between its parts"
            names[-1] += part
    assert sorted(names) == sorted(
        path.parent.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("config.json")
    )
    # Runs that are timed have no test, and so no BLEU.
    measures = {
        "copying": "acc",
        "mnist": "acc",
        "nmt": "BLEU",
        "nmt/time": "ppl",
        "convergence": "grad²",
    }
    for name, line in zip(names, rest, strict=True):
        folder = name.rpartition("/")[0]
        measure = measures.get(folder)
        assert measure is None or not line.rstrip().endswith("done") or measure in line, line


def test_a_run_without_its_log_is_listed_by_its_record(whole, tmp_path):
    for name in ("config.json", "record.json"):
        shutil.copy(whole / name, tmp_path)
    listed = [list(column.cells) for column in table(tmp_path).columns[1:]]
    assert listed == [list(column.cells) for column in table(whole).columns[1:]]


@pytest.mark.slow
def test_the_list_names_every_task_recipe_and_method():
    done = run("train", "--list")
    assert (done.returncode, done.stderr) == (0, "")
    words = set(re.split(r"[\s,]+", done.stdout))
    for name in task.TASKS:
        kind = task.load(name)
        assert {name, *recipes(kind), *kind.methods()} <= words
        assert set(meanings(kind.Config)) == {field.name for field in fields(kind.Config)}
        assert all(meanings(kind.Config).values()), "every setting has a meaning"


@pytest.mark.slow
def test_the_help_of_a_recipe_shows_its_settings_for_a_method():
    done = run("train", "adding/small", "--method", "lstm,cwy", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    # The option --set comes first, the table of settings last.
    settings = done.stdout[done.stdout.rindex("--set  ") :]
    shown = dict(re.findall(r"^(\w+) +(\S+) +\S", settings, re.MULTILINE))
    config = task.settings("adding/small", "lstm").config.to_dict()
    assert shown.keys() == config.keys()
    assert (shown["hidden_size"], shown["init"], shown["lr"]) == ("48", "none", "0.005")
    done = run("train", "adding/smal", "--help")
    assert (done.returncode, "Did you mean 'small'" in done.stderr) == (1, True)


def test_a_finished_run_is_described_whole(whole):
    record, config = (
        json.loads((whole / name).read_text()) for name in ("record.json", "config.json")
    )
    assert record["config"] == config
    assert (record["status"], record["steps"], record["cwy"]) == ("finished", 300, cwy.__version__)
    assert record["versions"]["torch"] == torch.__version__
    assert {"commit", "dirty", "device", "threads", "started", "seconds"} <= record.keys()
    assert record["parameters"] == 12 * 12 + 12 * 10 + 12 + 12 * 9 + 9
    assert record["best"]["metric"] == "test loss"
    assert record["best"]["value"] == min(
        row["loss"] for row in rows(whole) if row["split"] == "test"
    )
    assert record["final"]["train"]["loss"] == rows(whole)[-2]["loss"]
    assert record["crossings"] == {"0.01": None, "0.001": None}
    assert list((whole / "tensorboard").iterdir())


@pytest.mark.parametrize(
    ("method", "shown", "hidden"),
    [
        ("cwy", {"reflections", "init", "orthogonal_lr", "nonlinearity"}, {"base_every", "alpha"}),
        (
            "dtriv",
            {"base_every", "init", "orthogonal_lr", "nonlinearity"},
            {"reflections", "alpha"},
        ),
        ("rnn", {"nonlinearity", "init"}, {"reflections", "orthogonal_lr", "base_every", "alpha"}),
        (
            "lstm",
            set(),
            {"reflections", "init", "orthogonal_lr", "base_every", "nonlinearity", "alpha"},
        ),
    ],
)
def test_a_run_shows_its_settings_and_what_it_found(method, shown, hidden, tmp_path):
    said = train(tmp_path / "run", (method,), what="adding/small", iterations=2)[1]
    keys = set(re.findall(r"(\w+)=", said))
    assert keys.isdisjoint(hidden)
    config = set(json.loads((tmp_path / "run/config.json").read_text()))
    assert (
        keys
        == config - hidden - {"task", "recipe", "method", "seed", "device", "precision"}
        >= shown
    )
    assert f"Adding, T = 5: {method} does not learn to add.\nThe run: {tmp_path / 'run'}\n" in said


@pytest.mark.parametrize("name", ["copying", "adding"])
def test_every_method_trains(name, tmp_path):
    methods = task.load(name).methods()
    assert {"cwy", "hr", "exprnn", "dtriv", "scornn", "urnn", "eurnn", "rnn", "gru", "lstm"} <= set(
        methods
    )
    status, said = train(
        tmp_path, methods, what=f"{name}/small", hidden_size=6, iterations=2, log_every=2
    )
    assert status == 0, said
    assert len(list(tmp_path.glob("*/record.json"))) == len(methods)


def test_the_same_seed_gives_the_same_run(whole, tmp_path):
    assert train(tmp_path / "again")[0] == 0
    assert same(weights(whole), weights(tmp_path / "again"))
    assert numbers(whole) == numbers(tmp_path / "again")
    for _ in range(8):
        Folder(tmp_path).write_weights("copy", weights(whole))
        assert (tmp_path / "copy").read_bytes() == (whole / "weights.safetensors").read_bytes()


def test_a_moving_base_keeps_the_weight_and_resumes(tmp_path):
    assert train(tmp_path / "run", ("dtriv",), base_every=3, iterations=20, lr=1e-2)[0] == 0
    state = weights(tmp_path / "run")
    free = next(value for key, value in state.items() if key.endswith("original"))
    base = next(value for key, value in state.items() if key.endswith("base"))
    assert free.abs().max() > 0
    assert cwy.orthogonality_error(base) < 1e-5


@pytest.mark.parametrize("name", ["copying", "adding"])
def test_the_golden_curve(name, tmp_path):
    settings = {
        "T": 10,
        "hidden_size": 32,
        "batch_size": 32,
        "iterations": 50,
        "log_every": 10,
        "lr": 1e-3,
    }
    assert train(tmp_path / "run", what=f"{name}/small", precision="float64", **settings)[0] == 0
    losses = [row["loss"] for row in rows(tmp_path / "run") if row["split"] == "train"]
    assert losses == pytest.approx(GOLDEN[name], rel=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "settings", "message"),
    [
        ((), {"lrr": 1}, "unknown setting 'lrr'. Did you mean 'lr'"),
        (("--device", "cuda:77"), {}, "--device cuda:77 can't be used"),
        (("--method", "lstm"), {"reflections": 3}, "lstm has none. Set reflections=none."),
        (("--method", "lstm"), {"nonlinearity": "relu"}, "nonlinearity must be 'tanh' for lstm"),
        (("--method", "exprnn"), {"base_every": 3}, "base_every is a setting of dtriv"),
        (("--method", "scornn"), {"reflections": 3}, "scornn has none. Set reflections=none."),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(more, settings, message, tmp_path):
    done = run(*arguments(tmp_path / "run", *more, **settings))
    assert_one_line(done, message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "status"),
    [
        (["train"], 2),
        (["train", "copying/small", "--nosuch"], 2),
        (["train", "copyin"], 1),
        (["resume", "nowhere"], 1),
    ],
)
def test_exit_statuses_are_those_that_the_help_promises(given, status, tmp_path):
    done = run(*given, cwd=tmp_path)
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (status, "", False)


def test_a_bug_in_a_task_keeps_its_traceback(tmp_path, monkeypatch):
    # The same kind of error that the library raises where a setting does not suit it.
    monkeypatch.setattr(task.load("copying"), "model", lambda self: torch.nn.Linear(None, 3))
    with pytest.raises(TypeError):
        train(tmp_path / "run")
    status, said = train(tmp_path, seeds=(0, 1))
    assert (status, said.count("Traceback (most recent call last)")) == (1, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_another_run_is_left_alone(whole):
    with pytest.raises(
        RunError,
        match=r"another run: lr is 0\.001 there and 0\.5 here\. Choose another --out",
    ):
        train(whole, lr=0.5)


@pytest.mark.slow
def test_at_a_terminal_a_run_foretells_its_time_and_ctrl_c_leaves_everything_in_order(tmp_path):
    place = "a-folder-with-a-name/that-has-many-parts/so-that-it-does-not-fit"
    given = arguments(place, T=1000, iterations=10_000)
    seen = watch([*program(1), *given], tmp_path, lambda text: " left" in text)
    assert seen.status == 130
    *_, told, bar, stopped, command = seen.text.strip().splitlines()
    assert re.match(r"About .* of training here: 10,000 steps of [\d.e-]+ s", told)
    assert re.match(r"━+ step \d+/10000 .* left", bar)
    assert re.fullmatch(r"cwy: stopped at step \d+, and saved\. To go on:", stopped)
    assert command == f"    cwy resume {place}"
    assert seen.text.count("━ ") == 1, "the bar is drawn once"


def test_learning_rates_warm_up_and_fall():
    chosen = task.settings("copying/small", assignments=("warmup=4",))
    copying = task.load("copying")(chosen, torch.device("cpu"))
    assert [copying.rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert copying.rate(15) == 0.5
    assert not copying.capturable, "RMSprop reads its rates from numbers"


def test_a_warmup_that_does_not_fit_is_named(tmp_path):
    printed = io.StringIO()
    for warmup in (12, 40):
        texts = ("iterations=12", f"warmup={warmup}")
        chosen = task.settings("copying/small", assignments=texts)
        display = Display(Console(file=printed, width=200))
        Loop(chosen, Folder(tmp_path / str(warmup)), Group("cpu"), display).run()
    assert printed.getvalue().count("is longer than the run") == 1
    assert "warmup=40 is longer than the run, which has 12 steps." in printed.getvalue()
    chosen = task.settings("convergence/small", assignments=("warmup=4",))
    with pytest.raises(ConfigError, match="warmup is no setting of convergence"):
        task.load("convergence")(chosen, torch.device("cpu"))


@pytest.mark.parametrize("patience", [1, 2])
def test_a_run_ends_when_evaluations_are_not_better(patience, tmp_path):
    texts = ("lr=1e-30", "orthogonal_lr=1e-30", "evaluate_every=3", f"patience={patience}")
    chosen = task.settings("copying/small", assignments=texts)
    folder = Folder(tmp_path / "run")
    record = Loop(chosen, folder, Group("cpu"), Display(None)).run()
    assert record["best"]["step"] == 3, "weights that do not move have one loss"
    assert record["steps"] == 3 + 3 * patience
    assert record["final"]["test"]["loss"] == record["best"]["value"]
    assert "loss" in record["final"]["train"]


def test_patience_is_refused_where_evaluations_are_not_compared():
    chosen = task.settings("convergence/small", assignments=("patience=1",))
    with pytest.raises(ConfigError, match="which convergence does not"):
        task.load("convergence")(chosen, torch.device("cpu"))
    with pytest.raises(ConfigError, match="on validation pairs"):
        task.settings("nmt/small", assignments=("patience=1",))
    with pytest.raises(ConfigError, match="leaves only validation pairs"):
        task.settings("nmt/small", assignments=("final_test=false",))


def test_a_run_that_gets_better_does_not_end_early(tmp_path):
    records = []
    for patience in ("1", "none"):
        texts = ("iterations=12", "evaluate_every=4", f"patience={patience}")
        chosen = task.settings("adding/small", assignments=texts)
        loop = Loop(chosen, Folder(tmp_path / patience), Group("cpu"), Display(None))
        records.append(loop.run())
    assert [record["steps"] for record in records] == [12, 12]
    assert records[0]["final"]["test"] == records[1]["final"]["test"]


@pytest.mark.parametrize("clip", ["none", "1e-3"])
def test_gradients_are_clipped_together(clip, tmp_path):
    texts = ("optimizer=sgd", "lr=1", "orthogonal_lr=1", "iterations=1", f"clip={clip}")
    chosen = task.settings("copying/small", assignments=texts)
    loop = Loop(chosen, Folder(tmp_path / "run"), Group("cpu"), Display(None))
    before = [p.detach().clone() for p in loop.model.parameters()]
    loop.run()
    after = [p.detach() for p in loop.model.parameters()]
    moved = sum((a - b).square().sum() for a, b in zip(after, before, strict=True)).sqrt()
    if clip == "none":
        assert moved > 2e-3
    else:
        assert moved == pytest.approx(1e-3, rel=1e-3)
