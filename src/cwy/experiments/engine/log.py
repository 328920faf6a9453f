"""``metrics.jsonl`` and TensorBoard: one line a reading, without gaps or repeats when a run goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ... import _atomic
from . import files

FILE = "metrics.jsonl"
BOARD = "tensorboard"
LATEST = 10**12
"""The most steps that a line may count."""


class Log:
    """Appends to the log of a run folder.

    Args:
        folder: of the run.
        step: where the run goes on; lines after it, which will come again, are dropped.
        due: whether the evaluation of that step will come again, too.
    """

    def __init__(self, folder: Path, step: int, due: bool) -> None:
        path = folder / FILE
        kept = [
            line
            for line in read(path)
            if line["step"] < step + (line["split"] == "train" or not due)
        ]
        _atomic.write(path, "".join(_line(row) for row in kept).encode())
        files.refuse_link(folder / BOARD)
        self._file = files.append_to(path)
        self._board = _board(folder, step)

    def write(self, step: int, split: str, **metrics: Any) -> None:
        """Adds a line: ``step`` counts the steps done."""
        self._file.write(_line({"step": step, "split": split, **metrics}).encode())
        self._file.flush()
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(f"{split}/{name}", value, step)

    def sync(self) -> None:
        """What was written is on the disk: a checkpoint must not be ahead of its log."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; none if there is no file, and a last one that was cut short is left out."""
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
    step, split = found.pop("step"), found.pop("split")
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
