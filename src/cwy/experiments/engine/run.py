"""The folder of a run, and what is in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import _atomic
from . import checkpoint, files, log
from .config import ConfigError
from .task import Settings

CONFIG, RECORD, WEIGHTS, BEST = (
    "config.json",
    "record.json",
    "weights.safetensors",
    "best.safetensors",
)
DIVERGED = "diverged.txt"
ABOUT = "cwy"
"""The entry of metadata of the weights: which are complex, and their hash."""
LOCK = ".lock"


def differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """How settings differ, in words; the device may."""
    return [
        f"{key} is {there.get(key)} there"
        for key in here
        if there.get(key) != here[key] and key != "device"
    ]


@dataclass(frozen=True)
class Folder:
    """A run folder; see docs/experiments.md for what it holds."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def exists(self) -> bool:
        return (self.path / CONFIG).exists()

    @property
    def finished(self) -> bool:
        """Whether its record is there; one that is damaged raises."""
        if not (self.path / RECORD).exists():
            return False
        try:
            return self.record().get("status") == "finished"
        except files.Damaged as damage:
            raise ConfigError(f"{damage} To go on from the last checkpoint, delete it.") from None

    @property
    def diverged(self) -> bool:
        """Whether its last attempt could not go on; the file says why."""
        return (self.path / DIVERGED).exists()

    @property
    def remains(self) -> bool:
        """Whether parts of a run are there without its settings."""
        return not self.exists and (self.checkpoints.exists() or (self.path / log.FILE).exists())

    def settings(self) -> Settings:
        """What the run was started with; a file that is not whole or not known raises."""
        path = self.path / CONFIG
        try:
            return Settings.from_dict(files.read_json(path))
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"{self.path} is not a run folder: it has no {CONFIG}.") from None
        except files.Damaged as damage:
            raise ConfigError(str(damage)) from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}.") from None

    @contextmanager
    def claim(self, settings: Settings) -> Generator[None]:
        """Keeps other processes out until its end, or the process's; makes the folder of a new run.

        Raises where another process is at a run here, or was since it was last looked at.
        """
        from filelock import FileLock, Timeout

        self.path.mkdir(parents=True, exist_ok=True)
        if (self.path / LOCK).is_symlink():
            raise ConfigError(
                f"{self.path / LOCK} is a link, and a lock must be a file. Delete it."
            )
        lock = FileLock(self.path / LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(f"another process is at the run in {self.path}.") from None
        try:
            if not self.exists:
                files.write_json(self.path / CONFIG, settings.to_dict())
            elif differences(self.settings().to_dict(), settings.to_dict()) or self.finished:
                raise ConfigError(
                    f"another process has just been at the run in {self.path}: see `cwy runs {self.path}`."
                )
            yield
        finally:
            lock.release()

    def record(self) -> dict[str, Any]:
        """The record of a finished run."""
        return files.read_json(self.path / RECORD)

    def rows(self) -> list[dict[str, Any]]:
        """The lines of its log."""
        return log.read(self.path / log.FILE)

    def write_record(self, record: dict[str, Any]) -> None:
        files.write_json(self.path / RECORD, record)

    def write_weights(self, name: str, weights: dict[str, Tensor]) -> None:
        """A state dict as safetensors."""
        from safetensors.torch import save

        state = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
        # Complex tensors as pairs of real ones: safetensors knows complex64 alone, and that not everywhere.
        split = {
            key: torch.view_as_real(value).contiguous()
            for key, value in state.items()
            if value.is_complex()
        }
        # One entry of metadata: of several the order is random, and equal weights would be files that differ.
        about = {"complex": sorted(split), "sha256": _digest(state | split, sorted(split))}
        _atomic.write(self.path / name, save(state | split, {ABOUT: json.dumps(about)}))

    def write_file(self, name: str, content: bytes) -> None:
        """Anything else that belongs to the run."""
        _atomic.write(self.path / name, content)

    def read_weights(self, say: Callable[[str], object]) -> dict[str, Tensor]:
        """The real state dict at the end, or, of a run that has not ended, of its last checkpoint."""
        path = self.path / WEIGHTS
        if path.exists():
            return read_weights(path)
        content = checkpoint.last(self.checkpoints, say)
        if not content:
            raise ConfigError(f"{self.path} has neither {WEIGHTS} nor a checkpoint yet.")
        model = checkpoint.parse(content).get("model")
        if not isinstance(model, dict):
            raise files.Damaged(
                f"the last checkpoint in {self.checkpoints} has no model. Delete it."
            )
        return model

    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint, if there is one."""
        return next(iter(checkpoint.listed(self.checkpoints)), None)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a file that :meth:`Folder.write_weights` wrote, checked against the hash in it.

    Files written before there was a hash are read without.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    content = files.read(path)
    try:
        weights = load(content)
        length = int.from_bytes(content[:8], "little")
        about = json.loads(content[8 : 8 + length]).get("__metadata__", {}).get(ABOUT)
        if about is not None:
            told = json.loads(about)
            if told["sha256"] != _digest(weights, told["complex"]):
                raise ValueError("its weights are not those of its hash")
    except (
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise files.Damaged(f"{path} is damaged: {error}.") from None
    return weights


def _digest(weights: dict[str, Tensor], complex_names: list[str]) -> str:
    """Hash the names, types, shapes and bytes of all tensors."""
    found = hashlib.sha256(json.dumps(complex_names).encode())
    for name in sorted(weights):
        value = weights[name]
        found.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
