"""Run folders as the engine leaves them, with curves that are made up."""

import json
import math
import random
from pathlib import Path

CONFIG = {
    "recipe": "paper",
    "device": "cpu",
    "precision": "float32",
    "compile": False,
    "batch_size": 128,
    "optimizer": "rmsprop",
}
CONFIG |= {
    "lr": 2e-4,
    "orthogonal_lr": 2e-5,
    "hidden_size": 190,
    "reflections": None,
    "init": "henaff",
}


def write_run(
    folder: Path, config: dict, rows: list[dict], finished: bool = True, **record
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        last = rows[-1]
        whole = {
            "cwy": "0.1.0",
            "task": config["task"],
            "recipe": config["recipe"],
            "method": config["method"],
        }
        whole |= {
            "seed": config["seed"],
            "config": config,
            "commit": "0123456789abcdef",
            "dirty": False,
        }
        whole |= {
            "versions": {"cwy": "0.1.0", "torch": "2.13.0", "python": "3.11"},
            "device": "Some CPU",
            "threads": 2,
        }
        whole |= {
            "started": "2026-01-02T03:04:05",
            "status": "finished",
            "steps": last["step"],
            "seconds": last["seconds"],
        }
        whole |= {
            "parameters": 20000,
            "final": {row["split"]: _metrics(row) for row in rows},
            "best": {"metric": "loss", "value": last["loss"], "step": last["step"]},
            **record,
        }
        (folder / "record.json").write_text(json.dumps(whole))
    return folder


def _metrics(row: dict) -> dict:
    return {key: row[key] for key in row.keys() - {"step", "split", "seconds", "epoch"}}


def copying(
    root: Path,
    method: str,
    seed: int,
    T: int = 1000,
    fall: float = 0.0,
    finished: bool = True,
    **config,
) -> Path:
    """A loss that starts at ten times the baseline, comes down to it, and ``fall`` decades
    further.
    """
    noise, base = random.Random(f"{method} {seed} {T}"), 10 * math.log(8) / (T + 20)
    rows = []
    for step in range(20, 4001, 20):
        level = base * (1 + 9 * math.exp(-step / 100)) * 10 ** (-fall * max(0, step - 400) / 3600)
        row = {
            "step": step,
            "split": "train",
            "seconds": step * 0.0037,
            "loss": level * math.exp(noise.gauss(0, 0.08)),
        }
        rows.append({**row, "accuracy": 1 - level, "orthogonality_error": 1e-6, "step_ms": 3.7})
    rows += [{**rows[-1], "split": "test"}] * finished
    values = {
        str(level): next((row["step"] for row in rows if row["loss"] <= level), None)
        for level in (0.01, 0.001)
    }
    whole = {
        "task": "copying",
        "method": method,
        "seed": seed,
        **CONFIG,
        "T": T,
        "iterations": 4000,
        **config,
    }
    suffix = f"-L{config['reflections']}" if "reflections" in config else ""
    return write_run(
        root / f"T{T}-{method}{suffix}-seed{seed}", whole, rows, finished, crossings=values
    )


def mnist(
    root: Path, method: str, seed: int, top: float, hidden_size: int = 170, task: str = "mnist"
) -> Path:
    noise, rows = random.Random(f"{method} {seed}"), []
    for epoch in range(1, 71):
        common = {"step": epoch * 469, "seconds": epoch * 1.2, "epoch": epoch}
        accuracy = top - 0.6 * math.exp(-epoch / 4) - abs(noise.gauss(0, 0.004))
        rows.append({**common, "split": "train", "loss": 0.05 + 2 * math.exp(-epoch / 5)})
        rows.append({**common, "split": "test", "loss": 0.1, "accuracy": accuracy})
    whole = {
        "task": task,
        "method": method,
        "seed": seed,
        **CONFIG,
        "hidden_size": hidden_size,
        "epochs": 70,
    }
    best = max(rows[1::2], key=lambda row: row["accuracy"])
    record = {"best": {"metric": "accuracy", "value": best["accuracy"], "step": best["step"]}}
    return write_run(root / f"{task}-{method}-seed{seed}", whole, rows, **record)
