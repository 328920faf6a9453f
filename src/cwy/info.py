"""Versions, devices and methods, and which backend serves each op here and why.

All of it is plain data, for bug reports.
"""

from __future__ import annotations

import platform
from typing import Any

import torch

from ._provenance import versions
from .ops import dispatch
from .ops.recurrence.factors import factors_are_cheaper
from .ops.recurrence.nonlinearities import NONLINEARITIES
from .ops.recurrence.spec import Request, check_choices, computed_in
from .ops.wy import tiers
from .parametrizations import METHODS


def gather() -> dict[str, Any]:
    """Return everything that ``cwy info`` shows, as data that JSON can hold.

    Returns:
        ``versions`` maps a package to its version, or to "not installed". ``devices``, ``methods``,
        ``backends`` and ``tiers`` are lists of rows.

    Example:
        >>> gather()["devices"][0]["device"]
        'cpu'
    """
    return {
        "versions": versions(),
        "devices": devices(),
        "methods": methods(),
        "backends": backends(),
        "tiers": tiers.rows(),
    }


def devices() -> list[dict[str, Any]]:
    """Return a row for each device that torch can use, and for each kind it can't, with why."""
    cpu = {
        "device": "cpu",
        "name": platform.machine(),
        "vector": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    return [cpu, *_nvidia_devices(), _apple_device()]


def _nvidia_devices() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        reason = "this torch is built without CUDA"
        if torch.version.cuda or torch.version.hip:
            reason = "no GPU is visible"
        return [{"device": "cuda", "why_not": reason}]
    rows = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        rows.append(
            {
                "device": f"cuda:{index}",
                "name": found.name,
                "capability": f"{found.major}.{found.minor}",
                "memory_gib": round(found.total_memory / 2**30, 1),
            }
        )
    return rows


def _apple_device() -> dict[str, Any]:
    if torch.backends.mps.is_available():
        return {"device": "mps", "name": "Apple GPU"}
    reason = "this torch is built without MPS"
    if torch.backends.mps.is_built():
        reason = "no Apple GPU is visible"
    return {"device": "mps", "why_not": reason}


def usable(found: list[dict[str, Any]] | None = None) -> list[str]:
    """Return the kinds of device that torch can use, each once, of the rows of :func:`devices`.

    Example:
        >>> usable([{"device": "cuda:0"}, {"device": "cuda:1"}, {"device": "mps", "why_not": "…"}])
        ['cuda']
    """
    if found is None:
        found = devices()
    kinds = [row["device"].split(":")[0] for row in found if "why_not" not in row]
    return list(dict.fromkeys(kinds))


def methods() -> list[dict[str, Any]]:
    """Return the registered methods, as :class:`~cwy.registry.Method` describes them."""
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
    """Return for each op and usable device its backends in the order of choice.

    They are asked for a small float32 problem in eager mode. ``status`` is one of:

    - "serves": ``backend="auto"`` takes it. "would serve" where the device is not here.
    - "ready": it can serve, and ``why`` states when it does.
    - "passed over" or "not here": ``why`` is the reason.
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
    """Return the backends of one recurrence in the order of choice, and why each serves or not.

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
    dtype = computed_in(dtype)
    factored = reflections is not None and factors_are_cheaper(
        n, reflections, batch * steps, device, dtype
    )
    if not factored:
        reflections = None
    request = Request(n, batch, steps, dtype, device, nonlinearity, reflections, memory)
    serving = "would serve"
    if device.split(":")[0] in usable():
        serving = "serves"
    rows = _choice(dispatch.backends("rollout")["rollout"], request, serving)
    return [{"op": "rollout", "device": device, **row} for row in rows]


def _choice(
    candidates: list[dispatch.Backend], what: Any, serving: str = "serves"
) -> list[dict[str, str]]:
    """Return each backend's status for a problem. The first that is ready serves."""
    rows = []
    served = False
    for backend in candidates:
        status, why = _status(backend, what)
        if status == "ready" and not served:
            status = serving
            served = True
        rows.append({"backend": backend.name, "status": status, "why": why})
    return rows


def _status(backend: dispatch.Backend, what: Any) -> tuple[str, str]:
    """Return whether a backend is ready for a problem, and why or why not."""
    reason = backend.why_not(what)
    passed = backend.why_pass(what)
    if reason:
        return "not here", reason
    if passed:
        return "passed over", passed
    return "ready", backend.about or ""
