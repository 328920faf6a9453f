"""``metrics.jsonl`` and TensorBoard: one line a reading, without gaps or repeats when a run goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from . import files

FILE = "metrics.jsonl"


class Log:
    """Appends to the log of a run folder.

    Args:
        folder: of the run.
        step: where the run goes on; lines after it, which will come again, are dropped.
        due: whether the evaluation of that step will come again, too.
    """

    def __init__(self, folder: Path, step: int, due: bool) -> None:
        path = folder / FILE
        kept = [line for line in read(path) if line["step"] < step + (line["split"] == "train" or not due)]
        files.write(path, "".join(_line(row) for row in kept).encode())
        self._file = path.open("a", encoding="utf-8")
        self._board = _board(folder, step)

    def write(self, step: int, split: str, **metrics: Any) -> None:
        """Adds a line: ``step`` counts the steps done."""
        self._file.write(_line({"step": step, "split": split, **metrics}))
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
    *lines, _ = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            head = {"step": int(row.pop("step")), "split": str(row.pop("split"))}
            rows.append(head | {name: float(value) for name, value in row.items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise files.Damaged(f"{path} is damaged: line {number}: {error}.") from None
    return rows


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"


def _board(folder: Path, step: int):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
