"""Checkpoints: all that a run must remember to go on as if it had never stopped.

A file is written whole, hashed, and checked on reading. The last two are kept.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ... import __version__, _atomic, _provenance
from . import files, optimizers
from .config import ConfigError
from .distributed import Group
from .files import Damaged
from .monitor import Diverged, Meter, all_finite
from .task import Settings, differences

KEEP = 2
NAME = re.compile(r"step-[0-9]{8,12}\.pt")
LONGEST_HASH = 4096
"""The most bytes of a file with a hash."""
SHOWN = 300
"""The most characters of a reason that are shown."""
LONGEST_TIME = 1e10
"""The most seconds of training that a checkpoint may count."""
TYPES: dict[str, tuple[type, ...]] = {
    "due": (bool,),
    "seconds": (int, float),
    "started": (str,),
    "best": (dict, NoneType),
    "weights": (dict,),
    "crossings": (dict,),
    "final": (dict,),
    "peak_memory": (int,),
}
"""The types of what a checkpoint holds of a run's state."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Hold the parts of a run that keep a state of their own."""

    model: nn.Module
    optimizer: Optimizer
    meter: Meter


@dataclass
class State:
    """Hold the state of a run outside its model and optimizer.

    Attributes:
        settings: the run's, as ``config.json`` holds them.
        step: steps done.
        due: whether the evaluation of that step is still to come, or to come again.
        seconds: training time.
        started: when the run began.
        best: the best evaluation: metric, value and step.
        weights: the model's best state, on the host. A checkpoint holds it, because a resumed run
            may not come again to the step of the file with the best state.
        crossings: when the training loss first fell to each threshold.
        final: the last metrics of each split.
        peak_memory: the most bytes that training took on a GPU. Elsewhere it is 0.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    due: bool = False
    seconds: float = 0.0
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    best: dict[str, Any] | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)
    crossings: dict[str, int | None] = field(default_factory=dict)
    final: dict[str, dict[str, float]] = field(default_factory=dict)
    peak_memory: int = 0

    def save(self, folder: Path, group: Group, parts: Parts) -> None:
        """Write a checkpoint. Values that are not finite raise before anything is written."""
        whole = {
            "model": parts.model.state_dict(),
            "optimizer": parts.optimizer.state_dict(),
            "meter": parts.meter.state_dict(group),
            "random": {name: group.gather(state) for name, state in _random(group.device).items()},
            "run": vars(self),
        }
        if not all_finite(whole):
            raise Diverged(
                f"a weight or what the optimizer remembers is not finite after step {self.step}"
            )
        if group.first:
            save(folder, self.step, whole)
        # A rank that leaves early would have torchrun end the one that writes.
        group.wait()

    def restore(
        self,
        folder: Path,
        group: Group,
        parts: Parts,
        steps: int,
        say: Callable[[str], object],
    ) -> bool:
        """Read the last whole checkpoint. Return False if no checkpoint is whole.

        Args:
            folder: of the checkpoints.
            group: the processes. The first one reads.
            parts: what is restored along with this state.
            steps: of the whole run. A checkpoint of a later one raises.
            say: is called with a message for each damaged checkpoint.
        """
        content = b""
        if group.first:
            content = last(folder, say)
        content = group.broadcast(content)
        if not content:
            return False
        try:
            whole = parse(content)
            self._check(folder, whole, steps)
            self._load(folder.parent, whole, group, parts)
        except ConfigError:
            raise
        except Exception as error:
            # Its hash is right, but it may be forged: each of these calls has its own errors then.
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, Damaged):
                reason = str(error)
            raise Damaged(
                f"the last checkpoint in {folder} does not fit this run: {reason[:SHOWN]} "
                "To go on from the one before it, delete it."
            ) from error
        return True

    def _load(self, path: Path, whole: dict[str, Any], group: Group, parts: Parts) -> None:
        run = whole["run"]
        if run.get("weights"):
            # The best weights are loaded at the end of a run only. Whether they fit is checked now.
            _load_weights(path, run["weights"], parts.model)
        _load_weights(path, whole["model"], parts.model)
        optimizers.load(parts.optimizer, whole["optimizer"])
        parts.meter.load_state_dict(whole["meter"])
        for one in fields(self):
            # The settings stay: the device may be another one.
            if one.name != "settings":
                setattr(self, one.name, run.get(one.name, getattr(self, one.name)))
        random = whole["random"]
        rank = group.rank % len(random["cpu"])
        torch.set_rng_state(random["cpu"][rank])
        if group.device.type == "cuda" and "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"][rank], group.device)

    def _check(self, folder: Path, whole: dict[str, Any], steps: int) -> None:
        """Raise unless the parts of a checkpoint belong to this run and have the right types."""
        for name in ("model", "optimizer", "meter", "random", "run"):
            if not isinstance(whole.get(name), dict):
                raise Damaged(f"it has no {name!r}.")
        run = whole["run"]
        # A setting that an earlier version lacked has its default.
        there = Settings.from_dict(run["settings"]).to_dict()
        changed = differences(there, self.settings)
        if changed:
            raise ConfigError(
                f"{folder.parent}: config.json is not that of its checkpoints: "
                f"{', '.join(changed)}. Put it back, or start another run in another folder."
            )
        if type(run["step"]) is not int or not 0 <= run["step"] <= steps:
            raise Damaged(f"its step must be a whole number from 0 to {steps}.")
        if not all_finite(whole):
            raise Damaged("it has values that are not finite.")
        for name, types in TYPES.items():
            if name in run and type(run[name]) not in types:
                raise Damaged(f"its {name!r} is of the wrong type.")
        if not 0 <= run.get("seconds", 0.0) <= LONGEST_TIME:
            raise Damaged("its time is not one that a run takes.")
        _check_found(run)

    def record(
        self,
        environment: dict[str, Any],
        *,
        processes: int,
        parameters: int,
        data: dict[str, Any],
    ) -> dict[str, Any]:
        """Return what ``record.json`` holds of a run that has ended.

        Args:
            environment: as :func:`environment` found it when the run began.
            processes: how many there were.
            parameters: how many numbers the model learned.
            data: the facts of the run's data.
        """
        found = {
            "started": self.started,
            "status": "finished",
            "steps": self.step,
            "seconds": self.seconds,
            "processes": processes,
            "parameters": parameters,
            "final": self.final,
            "best": self.best,
        }
        some = {"data": data, "crossings": self.crossings, "peak_memory": self.peak_memory}
        return environment | found | {key: value for key, value in some.items() if value}


def environment(settings: Settings, device: torch.device) -> dict[str, Any]:
    """Return what the numbers of a run belong to, for its record."""
    commit = _provenance.commit()
    return {
        "cwy": __version__,
        "task": settings.task,
        "recipe": settings.recipe,
        "method": settings.method,
        "seed": settings.seed,
        "config": settings.to_dict(),
        "commit": commit.removesuffix("+dirty"),
        "dirty": commit.endswith("+dirty"),
        "versions": _provenance.versions(),
        "device": _provenance.device_name(device),
        "threads": torch.get_num_threads(),
    }


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write ``step-<step>.pt`` and its SHA-256, then delete all but the last two.

    A failure leaves earlier checkpoints as they were.
    """
    files.refuse_link(folder)
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:08d}.pt"
    if path.exists():
        return path
    for left in folder.glob(".*.partial"):
        left.unlink()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    digest = hashlib.sha256(content).hexdigest()
    # The hash first: then every checkpoint has one.
    _atomic.write(_hash_of(path), f"{digest}  {path.name}\n".encode())
    _atomic.write(path, content)
    for old in listed(folder)[KEEP:]:
        old.unlink()
        _hash_of(old).unlink(missing_ok=True)
    return path


def read(path: Path) -> bytes:
    """Return the bytes of a checkpoint, checked against its hash."""
    try:
        expected = files.read(_hash_of(path), LONGEST_HASH).decode("ascii", "replace").split()[0]
    except (FileNotFoundError, IndexError):
        raise Damaged(f"{path} is damaged: its hash {_hash_of(path).name} is missing.") from None
    content = files.read(path)
    if hashlib.sha256(content).hexdigest() != expected:
        raise Damaged(f"{path} is damaged: its bytes are not those of its sha256.")
    return content


def parse(content: bytes) -> dict[str, Any]:
    """Return the state in a checkpoint's bytes. Only tensors and plain values are read."""
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        # Bytes with the right hash may still be anybody's, and torch raises whatever it meets.
        raise Damaged(
            f"a checkpoint can't be read, though its hash is right: {type(error).__name__}."
        ) from error
    if not isinstance(state, dict):
        raise Damaged("a checkpoint holds no state, though its hash is right.")
    return state


def last(folder: Path, say: Callable[[str], object]) -> bytes:
    """Return the newest checkpoint that is whole, or no bytes.

    Damaged ones are reported to ``say``. If no checkpoint is whole, the call raises: no run is
    started again silently.
    """
    files.refuse_link(folder)
    paths = listed(folder)
    for path in paths:
        try:
            content = read(path)
        except Damaged as damage:
            say(f"{damage} Trying the one before.")
        else:
            # A file that can't be read does not count as one of the last two.
            for damaged in paths[: paths.index(path)]:
                damaged.rename(damaged.with_suffix(".damaged"))
            return content
    if paths:
        raise Damaged(
            f"no checkpoint in {folder} is whole. To start the run again, delete that folder."
        )
    return b""


def listed(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest first."""
    named = (path for path in folder.glob("step-*.pt") if NAME.fullmatch(path.name))
    return sorted(named, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    return int(path.stem.removeprefix("step-"))


def _hash_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _load_weights(run: Path, found: Mapping[str, Any], model: nn.Module) -> None:
    """Load the weights of a run into a model."""
    try:
        # A model may have its own reason against them, such as other data.
        model.load_state_dict(found)
    except RuntimeError:
        check_shapes(run, found, model)
        raise


def check_shapes(run: Path, found: Mapping[str, Any], model: nn.Module) -> None:
    """Raise if a weight of a run has another shape than the same settings give it now."""
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        there = found.get(name)
        if isinstance(there, Tensor) and there.shape != weight.shape:
            raise ConfigError(
                f"{run}: another version of cwy saved this run, or its config.json was changed. "
                f"Its weight {name} is {tuple(there.shape)}, and here it would be "
                f"{tuple(weight.shape)}. Use that version, or train another run in another folder."
            )


def _check_found(run: dict[str, Any]) -> None:
    """Raise unless what the run has found so far are numbers by name."""
    best = run.get("best")
    if best is not None:
        named = type(best["metric"]) is str and type(best["step"]) is int
        value = best["value"]
        if not named or type(value) not in (int, float) or not math.isfinite(value):
            raise Damaged("its best evaluation is missing.")
    for level, step in run.get("crossings", {}).items():
        if not math.isfinite(float(level)) or type(step) not in (int, NoneType):
            raise Damaged("its crossings are no steps.")
    for metrics in run.get("final", {}).values():
        for value in metrics.values():
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise Damaged("its last metrics are no numbers.")


def _random(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states
