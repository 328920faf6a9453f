"""Settings: strict, by name, reproducible."""

import dataclasses
import json

import pytest

from cwy.experiments.engine import task
from cwy.experiments.engine.config import ConfigError
from cwy.experiments.engine.task import TASKS, Settings

EVERY = [
    (name, recipe, method)
    for name in TASKS
    for recipe in task.load(name).recipes
    for method in task.load(name).methods()
]


def test_every_recipe_is_reproducible_from_its_name():
    for name, recipe, method in EVERY:
        first, again = (task.settings(f"{name}/{recipe}", method, 3) for _ in range(2))
        assert first == again
        assert Settings.from_dict(json.loads(json.dumps(first.to_dict()))) == first
        assert {
            "task",
            "recipe",
            "method",
            "seed",
            "device",
            "precision",
            "lr",
            "orthogonal_lr",
        } <= first.to_dict().keys()
        assert dataclasses.is_dataclass(first.config)
        with pytest.raises(dataclasses.FrozenInstanceError):
            first.config.lr = 1


def test_the_papers_settings():
    copying = task.settings("copying", "cwy").config
    assert (copying.T, copying.hidden_size, copying.batch_size, copying.iterations) == (
        1000,
        190,
        128,
        4000,
    )
    assert (copying.optimizer, copying.lr, copying.orthogonal_lr, copying.nonlinearity) == (
        "rmsprop",
        2e-4,
        2e-5,
        "modrelu",
    )
    assert [
        task.settings("copying/2000", m).config.init
        for m in ("cwy", "exprnn", "dtriv", "scornn", "urnn", "lstm")
    ] == [
        "henaff",
        "henaff",
        "henaff",
        "helfrich",
        "random",
        None,
    ]
    pixels = task.settings("pmnist/170", "scornn").config
    assert (pixels.hidden_size, pixels.batch_size, pixels.epochs, pixels.init) == (
        170,
        128,
        70,
        "helfrich",
    )
    assert {
        task.settings("mnist/512", m).config.init for m in ("cwy", "hr", "exprnn", "dtriv")
    } == {"helfrich-exp"}
    assert (pixels.lr, pixels.orthogonal_lr, pixels.base_every) == (7e-4, 7e-5, None)


def test_values_are_read_by_the_type_of_their_field():
    texts = (
        "lr=1e-3",
        "batch_size=64",
        "evaluate_every=none",
        "reflections=5",
        "nonlinearity=abs",
        "init=haar",
    )
    config = task.settings("copying/small", "cwy", assignments=texts).config
    assert (config.lr, config.batch_size, config.evaluate_every, config.reflections) == (
        1e-3,
        64,
        None,
        5,
    )
    assert (config.nonlinearity, config.init) == ("abs", "haar")


@pytest.mark.parametrize(
    ("what", "method", "assignment", "message"),
    [
        ("copyin", "cwy", None, "unknown task 'copyin'. Did you mean 'copying'"),
        ("copying/smal", "cwy", None, "unknown recipe of copying 'smal'. Did you mean 'small'"),
        ("copying", "cwi", None, "unknown method 'cwi'. Did you mean 'cwy'"),
        ("copying", "own", None, "unknown method 'own'"),
        ("copying", "cwy", "hidden=3", "unknown setting 'hidden'. Did you mean 'hidden_size'"),
        ("copying", "cwy", "lr", "--set takes key=value, got 'lr'"),
        ("copying", "cwy", "lr=fast", "lr must be a number, got 'fast'"),
        ("copying", "cwy", "lr=-1", "lr must be positive and finite, got -1.0"),
        ("copying", "cwy", "lr=nan", "lr must be positive and finite"),
        (
            "copying",
            "cwy",
            "clip=0",
            "clip must be positive and finite, got 0.0. It may also be none",
        ),
        (
            "nmt",
            "cwy",
            "dropout=0",
            "dropout must be above 0 and below 1, got 0.0. It may also be none",
        ),
        ("nmt", "cwy", "validation=1", "validation must be above 0 and below 1, got 1.0"),
        ("nmt", "cwy", "embedding_scale=1e-300", "embedding_scale must be at least 1e-06"),
        ("nmt", "cwy", "bucket=1000000000", "bucket must be at most 1,000, got"),
        ("copying", "cwy", "lr=1e99", "lr must be at most 1e+38, got 1e+99"),
        ("nmt", "cwy", "file=", "file must be the path of a file"),
        ("nmt/small", "cwy", "gate=false", "Set thin_gate=false"),
        ("copying", "cwy", "batch_size=1.5", "batch_size must be a whole number, got '1.5'"),
        ("copying", "cwy", "batch_size=none", "batch_size must be a whole number"),
        ("copying", "cwy", "optimizer=adan", "Did you mean 'adam'"),
        ("copying", "cwy", "nonlinearity=modrelo", "Did you mean 'modrelu'"),
    ],
)
def test_a_mistake_is_named_with_what_is_near(what, method, assignment, message):
    with pytest.raises(ConfigError) as error:
        task.settings(what, method, assignments=(assignment,) if assignment else ())
    assert message in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"lr": "fast"},
        {"lrr": 1.0},
        {"batch_size": 1.5},
        {"batch_size": True},
        {"T": None},
        {"seed": "1"},
        {"method": "cwi"},
    ],
)
def test_a_changed_config_file_is_refused(change):
    values = task.settings("copying/small", "cwy").to_dict() | change
    with pytest.raises(ConfigError, match=next(iter(change))):
        Settings.from_dict(values)
    del values["task"]
    with pytest.raises(ConfigError, match="lack task"):
        Settings.from_dict(values)
