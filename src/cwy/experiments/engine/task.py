"""What a task is: settings, a model, batches by seed and step, a loss, an evaluation."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from .config import Config, ConfigError, choose

C = TypeVar("C", bound=Config)
Batch = tuple[Tensor, ...]
Recipe = Callable[[str], Config]
Better = Callable[[float, float], bool]

SEEDS = 2**63
NAME = re.compile(r"[\w.:+-]{1,80}")
PRECISIONS = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}


@dataclass(frozen=True)
class Settings:
    """A run, whole: with the code it is all that its numbers depend on.

    Attributes:
        task, recipe, method, seed: what ``cwy train`` names.
        device, precision, compile: where and how; "bfloat16" is autocast over float32 weights.
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
        """The name of its folder in a sweep."""
        if self.recipe.startswith(self.method):
            return f"{self.recipe}-seed{self.seed}"
        reflections = getattr(self.config, "reflections", None)
        return f"{self.recipe}-{self.method}{f'-L{reflections}' if reflections else ''}-seed{self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """Flat, as ``config.json`` holds it."""
        head = asdict(self)
        return head | head.pop("config")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Settings:
        """The settings of a ``config.json``; strict."""
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


class Task(ABC, Generic[C]):
    """One experiment, set up for one run; a subclass a task.

    What is random is drawn from :meth:`generator`, so that step k has the same batch whether or not the run was stopped
    before, and on however many processes.

    Args:
        settings: of the run.
        device: where model and data live.

    Attributes:
        heed: called before each part of an evaluation, which it may end by raising.
    """

    name: ClassVar[str]
    Config: ClassVar[type[Config]]
    recipes: ClassVar[dict[str, Recipe]]
    """Settings by name; each is a function of the method. Published ones are added, never edited. The first is the default."""
    best: ClassVar[tuple[str, str, Better] | None]
    """Split, metric and ``better(new, old)`` of the state that is kept as the best; None keeps none."""
    precision: ClassVar[str] = "float32"
    """The precision where none is named."""
    crossings: ClassVar[tuple[float, ...]] = ()
    """The record says when the training loss first fell to each of these."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.config: C = settings.config  # pyrefly: ignore
        self.dtype = PRECISIONS[settings.precision]
        self.heed: Callable[[], None] = lambda: None

    @classmethod
    @abstractmethod
    def methods(cls) -> list[str]:
        """The names that ``--method`` takes."""

    @property
    @abstractmethod
    def iterations(self) -> int:
        """Steps in all."""

    @property
    def epoch(self) -> int | None:
        """Steps an epoch, or None."""
        return None

    @abstractmethod
    def model(self) -> nn.Module:
        """The model at its start, on the device. The global random state is the run's."""

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """The batch of a step, over all processes; the first dimension of each tensor counts its examples."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss over the examples, and further metrics, as scalars that stay on the device."""

    def evaluate(self, model: nn.Module) -> dict[str, dict[str, float]]:
        """Metrics by split, e.g. ``{"test": {"loss": 0.1, "accuracy": 0.9}}``."""
        return {}

    def at_end(self, model: nn.Module) -> dict[str, dict[str, float]]:
        """Further metrics by split, taken with the last evaluation alone."""
        return {}

    def conclude(self, model: nn.Module) -> tuple[dict[str, dict[str, float]], dict[str, bytes]]:
        """Called once, at the end, with the best state: metrics by split, and files for the run folder."""
        return {}, {}

    @property
    def unused(self) -> set[str]:
        """The settings that mean nothing to this run."""
        return set() if self.config.optimizer == "rmsprop" else {"alpha"}

    @property
    def facts(self) -> dict[str, Any]:
        """What the record says of the data."""
        return {}

    def watch(self, model: nn.Module) -> dict[str, Tensor]:
        """Metrics that need the gradients: called after the backward, before the step."""
        return {}

    @property
    def capturable(self) -> bool:
        """Whether every step is the same computation, so that a graph of one can be replayed for all."""
        return type(self).rate is Task.rate

    def rate(self, step: int) -> float:
        """What the learning rates are multiplied by at a step."""
        return 1.0

    def after_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Called when a step has been taken; ``step`` counts it."""

    def mean(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Loss and metrics over all examples of some batches. Waits for the device once, at the end."""
        sums, count, names = torch.zeros((), dtype=torch.float64, device=self.device), 0, ["loss"]
        for batch in batches:
            self.heed()
            loss, metrics = self.loss(model, batch)
            sums = sums + torch.stack([loss, *metrics.values()]).double() * len(batch[0])
            count, names = count + len(batch[0]), ["loss", *metrics]
        return dict(zip(names, (sums / count).tolist(), strict=True))

    def generator(self, *what: object, device: torch.device | str | None = None) -> torch.Generator:
        """Random numbers that depend on the seed and on ``what`` alone, as in ``generator("train", step)``."""
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
}
TASKS = tuple(HOMES)
"""The tasks' names. A task is a subclass of Task in the folder that HOMES names."""


def load(name: str) -> type[Task]:
    """The task of this name; an unknown one raises with the nearest names."""
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
    """The settings of a run from its name, ``TASK`` or ``TASK/RECIPE``, and what is set beside it; mistakes raise.

    Without a method it is the one that the recipe is named after, or the task's first.
    """
    name, _, recipe = what.partition("/")
    task = load(name)
    recipe = choose(f"recipe of {name}", recipe or next(iter(task.recipes)), task.recipes)
    named = (
        name for name in sorted(task.methods(), key=len, reverse=True) if recipe.startswith(name)
    )
    method = choose(
        "method", next(named, task.methods()[0]) if method is None else method, task.methods()
    )
    precision = choose("precision", precision or task.precision, PRECISIONS)
    config = task.recipes[recipe](method).with_settings(assignments)
    return Settings(name, recipe, method, seed, config, device, precision, compile)
