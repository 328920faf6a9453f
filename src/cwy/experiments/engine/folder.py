"""The folder of a run: its settings, log, weights and record."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import _atomic
from . import checkpoint, files
from .config import ConfigError
from .task import Settings, differences

CONFIG = "config.json"
RECORD = "record.json"
WEIGHTS = "weights.safetensors"
BEST = "best.safetensors"
DIVERGED = "diverged.txt"
METRICS = "metrics.jsonl"
BOARD = "tensorboard"
LOCK = ".lock"
ABOUT = "cwy"
"""The metadata entry of the weights: which are complex, and their hash."""
LATEST = 10**12
"""The most steps that a line of the log may count."""


class Claimed(ConfigError):
    """Report that another process trains, or has just trained, the run in a folder."""


@dataclass(frozen=True)
class Folder:
    """Read and write a run folder. docs/experiments.md lists what it holds."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Return the folder of its checkpoints."""
        return self.path / "checkpoints"

    @property
    def exists(self) -> bool:
        """Return whether a run was started here."""
        return (self.path / CONFIG).exists()

    @property
    def finished(self) -> bool:
        """Return whether its record is there. A damaged one raises."""
        if not (self.path / RECORD).exists():
            return False
        try:
            return self.record().get("status") == "finished"
        except files.Damaged as damage:
            raise ConfigError(f"{damage} To go on from the last checkpoint, delete it.") from None

    @property
    def diverged(self) -> bool:
        """Return whether its last attempt could not go on. The file holds the reason."""
        return (self.path / DIVERGED).exists()

    @property
    def remains(self) -> bool:
        """Return whether parts of a run are there without its settings."""
        return not self.exists and (self.checkpoints.exists() or (self.path / METRICS).exists())

    def settings(self) -> Settings:
        """Return the settings that the run was started with. A damaged or unknown file raises."""
        path = self.path / CONFIG
        try:
            return Settings.from_dict(files.read_json(path))
        except (FileNotFoundError, NotADirectoryError):
            hint = ""
            if self.path.is_dir():
                hint = f" To list the runs in it: cwy runs {self.path}"
            raise ConfigError(
                f"{self.path} is not a run folder: it has no {CONFIG}.{hint}"
            ) from None
        except files.Damaged as damage:
            raise ConfigError(str(damage)) from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}.") from None

    @contextmanager
    def claim(self, settings: Settings) -> Generator[None]:
        """Keep other processes out inside this context, and make the folder of a new run.

        Raises if another process trains here, or has trained here since the folder was checked.
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
            raise Claimed(f"another process is at the run in {self.path}.") from None
        try:
            if not self.exists:
                files.write_json(self.path / CONFIG, settings.to_dict())
            elif differences(self.settings().to_dict(), settings.to_dict()) or self.finished:
                raise Claimed(
                    f"another process has just been at the run in {self.path}: "
                    f"see `cwy runs {self.path}`."
                )
            yield
        finally:
            lock.release()

    def record(self) -> dict[str, Any]:
        """Return the record of a finished run."""
        return files.read_json(self.path / RECORD)

    def rows(self) -> list[dict[str, Any]]:
        """Return the lines of its log."""
        return read_log(self.path / METRICS)

    def write_record(self, record: dict[str, Any]) -> None:
        """Write ``record.json``."""
        files.write_json(self.path / RECORD, record)

    def write_weights(self, name: str, weights: dict[str, Tensor]) -> None:
        """Write a state dict as safetensors."""
        from safetensors.torch import save

        state = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
        # Complex tensors become pairs of real ones: some safetensors releases lack complex128.
        split = {
            key: torch.view_as_real(value).contiguous()
            for key, value in state.items()
            if value.is_complex()
        }
        # One entry of metadata: the order of several is random, and equal weights would differ.
        about = {"complex": sorted(split), "sha256": _digest(state | split, sorted(split))}
        _atomic.write(self.path / name, save(state | split, {ABOUT: json.dumps(about)}))

    def write_file(self, name: str, content: bytes) -> None:
        """Write any other file of the run."""
        _atomic.write(self.path / name, content)

    def read_weights(self, say: Callable[[str], object]) -> dict[str, Tensor]:
        """Return the real state dict of the best evaluation, or else the last one.

        A run that has not ended has the last one in a checkpoint.
        """
        best = self.path / BEST
        if best.exists():
            return read_weights(best)
        last = self.path / WEIGHTS
        if last.exists():
            if self._had_best():
                say(f"{best} is missing: the network is that of the end, and not the best one.")
            return read_weights(last)
        content = checkpoint.last(self.checkpoints, say)
        if not content:
            reason = "The run has saved none yet, or a sweep has removed them."
            if self.diverged:
                reason = "The run diverged, and a run keeps only what is finite."
            raise ConfigError(f"{self.path} has neither {WEIGHTS} nor a checkpoint. {reason}")
        model = checkpoint.parse(content).get("model")
        if not isinstance(model, dict):
            raise files.Damaged(
                f"the last checkpoint in {self.checkpoints} has no model. Delete it."
            )
        return model

    def _had_best(self) -> bool:
        """Return whether the record of a finished run names a best evaluation."""
        try:
            return self.record().get("best") is not None
        except (OSError, files.Damaged):
            return False

    def last_checkpoint(self) -> Path | None:
        """Return the newest checkpoint, if there is one."""
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
            expected = json.loads(about)
            if expected["sha256"] != _digest(weights, expected["complex"]):
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


class Log:
    """Append to ``metrics.jsonl`` and TensorBoard, without gaps or repeats when a run continues.

    Args:
        folder: of the run.
        step: where the run continues. Later lines are dropped, because they will come again.
        due: whether the evaluation of that step will come again, too.
    """

    def __init__(self, folder: Path, step: int, due: bool) -> None:
        path = folder / METRICS
        kept = [
            line
            for line in read_log(path)
            if line["step"] < step + (line["split"] == "train" or not due)
        ]
        _atomic.write(path, "".join(_line(row) for row in kept).encode())
        files.refuse_link(folder / BOARD)
        self._file = files.append_to(path)
        self._board = _board(folder, step)

    def write(self, step: int, split: str, **metrics: Any) -> None:
        """Add a line. ``step`` counts the steps done."""
        self._file.write(_line({"step": step, "split": split, **metrics}).encode())
        self._file.flush()
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(f"{split}/{name}", value, step)

    def sync(self) -> None:
        """Flush the lines to the disk: a checkpoint must not be ahead of its log."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, or none if there is no file.

    A last line that was cut short is left out.
    """
    if not path.exists():
        return []
    *lines, _ = files.read(path).decode("utf-8", errors="replace").split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(_row(json.loads(line)))
        except RecursionError:
            raise files.Damaged(f"{path} is damaged: line {number}: nested too deep.") from None
        except (ValueError, KeyError, OverflowError) as error:
            raise files.Damaged(f"{path} is damaged: line {number}: {error}.") from None
    return rows


def _row(found: Any) -> dict[str, Any]:
    """Check what a line holds: a step, a split, and numbers by name."""
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")
    step = found.pop("step")
    split = found.pop("split")
    if type(step) is not int or not 0 <= step <= LATEST:
        raise ValueError(f"step must be a whole number from 0 to {LATEST}")
    if type(split) is not str:
        raise ValueError("split must be a name")
    for name, value in found.items():
        if type(value) not in (int, float):
            raise ValueError(f"{name!r} must be a number")
    return {"step": step, "split": split} | {name: float(value) for name, value in found.items()}


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"


def _board(folder: Path, step: int):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / BOARD), purge_step=step + 1)
