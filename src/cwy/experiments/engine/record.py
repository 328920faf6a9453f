"""The record of a run: what it found, and what its numbers belong to."""

from __future__ import annotations

from typing import Any

import torch

from ... import __version__, _provenance
from .state import State
from .task import Settings


def environment(settings: Settings, device: torch.device) -> dict[str, Any]:
    """What the numbers of a run belong to."""
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


def record(
    environment: dict[str, Any],
    state: State,
    processes: int,
    parameters: int,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """What ``record.json`` says of a run that has ended; ``facts`` are those of its data."""
    found = {
        "started": state.started,
        "status": "finished",
        "steps": state.step,
        "seconds": state.seconds,
        "processes": processes,
        "parameters": parameters,
        "final": state.final,
        "best": state.best,
    }
    some = {"data": facts, "crossings": state.crossings, "peak_memory": state.peak_memory}
    return environment | found | {key: value for key, value in some.items() if value}
