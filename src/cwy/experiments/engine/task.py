"""The contract of a task: settings, a model, batches by seed and step, a loss, an evaluation."""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .config import Config, ConfigError, as_given, choose
from .optimizers import schedulable

C = TypeVar("C", bound=Config)
Batch = tuple[Tensor, ...]
Recipe = Callable[[str], Config]
Better = Callable[[float, float], bool]

SEEDS = 2**63
NAME = re.compile(r"[\w.:+-]{1,80}")
PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}


@dataclass(frozen=True)
class Settings:
    """Hold all that a run's numbers depend on, apart from the code.

    Attributes:
        task, recipe, method, seed: what ``cwy train`` names.
        device, precision, compile: where and how. "bfloat16" is autocast over float32 weights.
        config: every other setting.
    """

    task: str
    recipe: str
    method: str
    seed: int
    config: Config
    device: str = "cpu"
    precision: str = "float32"
    compile: bool = False

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed < SEEDS:
            raise ConfigError(
                f"seed must be a whole number from 0 to 2**63 - 1, got {repr(self.seed)[:40]}."
            )
        if type(self.compile) is not bool:
            raise ConfigError(f"compile must be true or false, got {repr(self.compile)[:40]}.")
        for key in ("recipe", "device"):
            name = getattr(self, key)
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise ConfigError(f"{key} must be a name, got {repr(name)[:40]}.")

    @property
    def name(self) -> str:
        """Return the name of its folder in a sweep."""
        parts = [self.recipe]
        if not _is_named_after(self.recipe, self.method):
            parts.append(self.method)
            reflections = getattr(self.config, "reflections", None)
            if reflections:
                parts.append(f"L{reflections}")
        return "-".join([*parts, f"seed{self.seed}"])

    def to_dict(self) -> dict[str, Any]:
        """Return a flat dictionary, as ``config.json`` holds it."""
        head = asdict(self)
        return head | head.pop("config")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Settings:
        """Return the settings of a ``config.json``. Unknown and missing keys raise."""
        keys = ("task", "recipe", "method", "seed", "device", "precision", "compile")
        missing = [key for key in keys if key not in values]
        if missing:
            raise ConfigError(f"the settings lack {', '.join(missing)}.")
        head = {key: values[key] for key in keys}
        rest = {key: value for key, value in values.items() if key not in keys}
        task = load(head["task"])
        choose("method", head["method"], task.methods())
        choose("precision", head["precision"], PRECISIONS)
        return cls(**head, config=task.Config.from_dict(rest))


def differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Return how settings differ, in words. The device may differ."""
    return [
        f"{key} is {as_given(there.get(key))} there and {as_given(here[key])} here"
        for key in here
        if there.get(key) != here[key] and key != "device"
    ]


class Best(NamedTuple):
    """Describe the metric by which a run keeps its best state.

    Attributes:
        split, metric: which number of an evaluation.
        better: ``better(new, old)`` returns whether the new value is the better one.
    """

    split: str
    metric: str
    better: Better


class Task(ABC, Generic[C]):
    """Set up one experiment for one run. Each task is a subclass.

    Random numbers come from :meth:`generator`. Step k then has the same batch whether or not the
    run was stopped before, and on any number of processes.

    Args:
        settings: of the run.
        device: where model and data live.

    Attributes:
        heed: is called before each part of an evaluation, which it may end by raising.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Config]]
    recipes: ClassVar[dict[str, Recipe]]
    """Settings by name, each a function of the method. The first is the default.

    Those of a paper are never edited.
    """
    best: ClassVar[Best | None]
    """The metric by which a run keeps its best state. None keeps none."""
    precision: ClassVar[str] = "float32"
    """The precision where none is named."""
    crossings: ClassVar[tuple[float, ...]] = ()
    """Levels of the training loss. The record holds when it first fell to each."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        self.config: C = settings.config  # pyrefly: ignore
        self.dtype = PRECISIONS[settings.precision]
        if self.config.patience is not None and self.best is None:
            raise ConfigError(
                f"patience is a setting of tasks that compare evaluations, which {self.name} does "
                "not. Leave it out."
            )
        self.heed: Callable[[], None] = lambda: None

    @classmethod
    @abstractmethod
    def methods(cls) -> list[str]:
        """Return the names that ``--method`` takes."""

    @property
    @abstractmethod
    def iterations(self) -> int:
        """Return the steps of the whole run."""

    @property
    def epoch(self) -> int | None:
        """Return the steps per epoch, or None."""
        return None

    @abstractmethod
    def model(self) -> nn.Module:
        """Return the initial model, on the device. The global random state is the run's."""

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """Return the batch of a step, over all processes.

        The first dimension of each tensor counts the examples.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss over the examples and further metrics, as scalars on the device."""

    def evaluate(self, model: nn.Module) -> dict[str, dict[str, float]]:
        """Return metrics by split, e.g. ``{"test": {"loss": 0.1, "accuracy": 0.9}}``."""
        return {}

    def at_end(self, model: nn.Module) -> dict[str, dict[str, float]]:
        """Return further metrics by split. Only the last evaluation has them."""
        return {}

    def conclude(self, model: nn.Module) -> tuple[dict[str, dict[str, float]], dict[str, bytes]]:
        """Return metrics by split and files for the run folder, from the best state.

        It is called once, at the end.
        """
        return {}, {}

    @property
    def unused(self) -> set[str]:
        """Return the settings that mean nothing to this run."""
        if self.config.optimizer == "rmsprop":
            return set()
        return {"alpha"}

    @property
    def facts(self) -> dict[str, Any]:
        """Return what the record states about the data."""
        return {}

    def watch(self, model: nn.Module) -> dict[str, Tensor]:
        """Return metrics of the gradients. It is called between backward pass and step."""
        return {}

    @property
    def capturable(self) -> bool:
        """Return whether every step is the same computation, as a CUDA graph needs it.

        Learning rates may change if the optimizer holds them as tensors, see :func:`schedulable`.
        """
        if type(self).rate is not Task.rate:
            return False
        return self.config.warmup is None or schedulable(self.config)

    def rate(self, step: int) -> float:
        """Return the factor of the learning rates at a step, which counts from 0."""
        warmup = self.config.warmup
        if warmup is None:
            return 1.0
        number = step + 1
        if number < warmup:
            return number / warmup
        return math.sqrt(warmup / number)

    def after_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """React to a step that was taken. ``step`` counts it."""

    def mean(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Return loss and metrics over all examples of some batches.

        The call synchronizes with the host once, at the end.
        """
        sums = torch.zeros((), dtype=torch.float64, device=self.device)
        count = 0
        names = ["loss"]
        for batch in batches:
            self.heed()
            loss, metrics = self.loss(model, batch)
            sums = sums + torch.stack([loss, *metrics.values()]).double() * len(batch[0])
            count += len(batch[0])
            names = ["loss", *metrics]
        return dict(zip(names, (sums / count).tolist(), strict=True))

    def generator(self, *what: object, device: torch.device | str | None = None) -> torch.Generator:
        """Return a generator that depends only on the seed and ``what``, e.g. ``"train", step``."""
        text = "/".join(map(str, (self.settings.seed, *what)))
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        return torch.Generator(device or self.device).manual_seed(seed)


HOMES = {
    "copying": "copying",
    "adding": "adding",
    "mnist": "mnist",
    "pmnist": "mnist",
    "convergence": "convergence",
    "kth": "video",
    "weizmann": "video",
    "movingmnist": "video",
    "nmt": "nmt",
    "retrieval": "retrieval",
}
TASKS = tuple(HOMES)
"""The names of the tasks. HOMES names the folder of each."""


def load(name: str) -> type[Task]:
    """Return the task of this name. An unknown one raises with the nearest names."""
    choose("task", name, TASKS)
    tasks = import_module(f"...{HOMES[name]}", __name__).TASKS
    return next(task for task in tasks if task.name == name)


def settings(
    what: str,
    method: str | None = None,
    seed: int = 0,
    assignments: tuple[str, ...] = (),
    *,
    device: str = "cpu",
    precision: str | None = None,
    compile: bool = False,
) -> Settings:
    """Return the settings of a run from its name, ``TASK`` or ``TASK/RECIPE``. Mistakes raise.

    The default method is the one that the recipe is named after, or the task's first.
    """
    name, _, recipe = what.partition("/")
    task = load(name)
    recipe = choose(f"recipe of {name}", recipe or next(iter(task.recipes)), task.recipes)
    if method is None:
        method = _method_of(recipe, task.methods())
    method = choose("method", method, task.methods())
    precision = choose("precision", precision or task.precision, PRECISIONS)
    config = task.recipes[recipe](method).with_settings(assignments)
    return Settings(name, recipe, method, seed, config, device, precision, compile)


def _method_of(recipe: str, methods: list[str]) -> str:
    """Return the longest method name that a recipe is named after, or the first method."""
    for name in sorted(methods, key=len, reverse=True):
        if _is_named_after(recipe, name):
            return name
    return methods[0]


def _is_named_after(recipe: str, method: str) -> bool:
    """Return whether a recipe's name begins with a method's, as ``lstm`` and ``paper-lstm`` do."""
    return recipe.removeprefix("paper-").startswith(method)
