"""What is here: versions, devices, methods, and which backend serves each op, and why. Plain data, for bug reports."""

from __future__ import annotations

import platform
from typing import Any

import torch

from ._provenance import versions
from .ops import dispatch
from .ops.recurrence.functions import Request, check_choices, factors_are_cheaper
from .ops.recurrence.nonlinearities import NONLINEARITIES
from .parametrizations import METHODS


def gather() -> dict[str, Any]:
    """Everything that ``cwy info`` shows, as data that JSON can hold.

    Returns:
        ``versions``: package to version, or "not installed"; ``devices``, ``methods`` and ``backends``: lists of rows.

    Example:
        >>> gather()["devices"][0]["device"]
        'cpu'
    """
    return {
        "versions": versions(),
        "devices": devices(),
        "methods": methods(),
        "backends": backends(),
    }


def devices() -> list[dict[str, Any]]:
    """One row a device that torch can use, and one for each kind it can't, with the reason."""
    cpu = {
        "device": "cpu",
        "name": platform.machine(),
        "vector": torch.backends.cpu.get_cpu_capability(),
    }
    rows: list[dict[str, Any]] = [{**cpu, "threads": torch.get_num_threads()}]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            of = torch.cuda.get_device_properties(index)
            capability, memory = f"{of.major}.{of.minor}", round(of.total_memory / 2**30, 1)
            rows.append(
                {
                    "device": f"cuda:{index}",
                    "name": of.name,
                    "capability": capability,
                    "memory_gib": memory,
                }
            )
    else:
        built = torch.version.cuda or torch.version.hip
        rows.append(
            {
                "device": "cuda",
                "why_not": "no GPU is visible" if built else "this torch is built without CUDA",
            }
        )
    if torch.backends.mps.is_available():
        rows.append({"device": "mps", "name": "Apple GPU"})
    else:
        built = torch.backends.mps.is_built()
        rows.append(
            {
                "device": "mps",
                "why_not": "no Apple GPU is visible"
                if built
                else "this torch is built without MPS",
            }
        )
    return rows


def usable(found: list[dict[str, Any]] | None = None) -> list[str]:
    """Return the kinds of device that torch can use, each once, of the rows of :func:`devices`.

    Example:
        >>> usable([{"device": "cpu"}, {"device": "cuda:0"}, {"device": "cuda:1"}, {"device": "mps", "why_not": "none"}])
        ['cpu', 'cuda']
    """
    rows = devices() if found is None else found
    return list(dict.fromkeys(row["device"].split(":")[0] for row in rows if "why_not" not in row))


def methods() -> list[dict[str, Any]]:
    """The registered methods, as :class:`~cwy.registry.Method` describes them."""
    return [
        {
            "name": m.name,
            "domain": m.domain,
            "kind": m.kind,
            "complex": m.complex,
            "real": m.real,
            "paper": m.paper,
        }
        for m in METHODS.values()
    ]


def backends() -> list[dict[str, Any]]:
    """For each op and usable device its backends in the order of choice, asked for a small float32 problem in eager mode.

    ``status`` is "serves" (what ``backend="auto"`` takes; "would serve" where the device is not here), "ready" (can serve;
    ``why`` says when it does), "passed over" or "not here" (``why`` is the reason).
    """
    rows: list[dict[str, Any]] = []
    for device in usable():
        wy = _choice(dispatch.backends("wy")["wy"], torch.zeros(2, 2, device=device))
        rows += [{"op": "wy", "device": device, **row} for row in wy]
        rows += rollout(128, device=device)
        images = _choice(
            dispatch.backends("conv_rollout")["conv_rollout"],
            Request(32, 3, 100, torch.float32, device, "relu"),
        )
        rows += [{"op": "conv_rollout", "device": device, **row} for row in images]
    return rows


def rollout(
    n: int,
    reflections: int | None = None,
    batch: int = 128,
    steps: int = 512,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    nonlinearity: str = "modrelu",
    memory: str = "store",
) -> list[dict[str, Any]]:
    """For one recurrence its backends in the order of choice: which serves, and why the others are passed over.

    Example:
        >>> from cwy import info
        >>> [row["backend"] for row in info.rollout(190) if row["status"] == "serves"]
        ['torch']
    """
    check_choices("info.rollout", nonlinearity, "all", memory)
    try:
        torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"info.rollout: unknown device {device!r}, e.g. cpu, cuda, cuda:1."
        ) from None
    if not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(
            f"info.rollout: dtype must be real or complex floating point, got {dtype}."
        )
    if reflections is not None and not 1 <= reflections <= n:
        raise ValueError(
            f"info.rollout: reflections must be between 1 and N = {n}, got {reflections}."
        )
    if dtype.is_complex and not NONLINEARITIES[nonlinearity].complex:
        raise ValueError(f"info.rollout: nonlinearity {nonlinearity!r} has no complex form.")
    # As the op does.
    dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    factored = reflections is not None and factors_are_cheaper(
        n, reflections, batch * steps, device, dtype
    )
    request = Request(
        n, batch, steps, dtype, device, nonlinearity, reflections if factored else None, memory
    )
    here = device.split(":")[0] in usable()
    rows = _choice(
        dispatch.backends("rollout")["rollout"], request, "serves" if here else "would serve"
    )
    return [{"op": "rollout", "device": device, **row} for row in rows]


def _choice(
    candidates: list[dispatch.Backend], what: Any, serving: str = "serves"
) -> list[dict[str, str]]:
    rows, served = [], False
    for backend in candidates:
        reason, passed = backend.why_not(what), backend.why_pass(what)
        status, why = (
            ("not here", reason)
            if reason
            else ("passed over", passed)
            if passed
            else ("ready", backend.about)
        )
        if status == "ready" and not served:
            status, served = serving, True
        rows.append({"backend": backend.name, "status": status, "why": why or ""})
    return rows
