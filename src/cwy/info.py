"""What is here: versions, devices, methods, and which backend serves each op, and why. Plain data, for bug reports."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import torch

from ._version import __version__
from .ops import dispatch
from .parametrizations import METHODS

OPTIONAL = ("numpy", "triton", "cuda-core", "cuda-bindings", "typer", "rich", "matplotlib")


def gather() -> dict[str, Any]:
    """Everything that ``cwy info`` shows, as data that JSON can hold.

    Returns:
        ``versions``: package to version, or "not installed"; ``devices``, ``methods`` and ``backends``: lists of rows.

    Example:
        >>> gather()["devices"][0]["device"]
        'cpu'
    """
    return {"versions": versions(), "devices": devices(), "methods": methods(), "backends": backends()}


def versions() -> dict[str, str]:
    """Versions of cwy, Python, torch and the optional packages."""
    found = {"cwy": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in OPTIONAL:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def devices() -> list[dict[str, Any]]:
    """One row a device that torch can use, and one for each kind it can't, with the reason."""
    cpu = {"device": "cpu", "name": platform.machine(), "vector": torch.backends.cpu.get_cpu_capability()}
    rows: list[dict[str, Any]] = [{**cpu, "threads": torch.get_num_threads()}]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            of = torch.cuda.get_device_properties(index)
            capability, memory = f"{of.major}.{of.minor}", round(of.total_memory / 2**30, 1)
            rows.append({"device": f"cuda:{index}", "name": of.name, "capability": capability, "memory_gib": memory})
    else:
        built = torch.version.cuda or torch.version.hip
        rows.append({"device": "cuda", "why_not": "no GPU is visible" if built else "this torch is built without CUDA"})
    if torch.backends.mps.is_available():
        rows.append({"device": "mps", "name": "Apple GPU"})
    else:
        built = torch.backends.mps.is_built()
        rows.append({"device": "mps", "why_not": "no Apple GPU is visible" if built else "this torch is built without MPS"})
    return rows


def methods() -> list[dict[str, Any]]:
    """The registered methods, as :class:`~cwy.registry.Method` describes them."""
    return [
        {"name": m.name, "domain": m.domain, "kind": m.kind, "complex": m.complex, "paper": m.paper} for m in METHODS.values()
    ]


def backends() -> list[dict[str, Any]]:
    """For each op and usable device its backends in the order of choice, asked with a small float32 matrix in eager mode.

    ``status`` is "serves" (what ``backend="auto"`` takes), "ready" (can serve; ``why`` says when it does), "not here"
    (``why`` is the reason), or "depends" where the op's other arguments decide.
    """
    rows: list[dict[str, Any]] = []
    for device in dict.fromkeys(row["device"].split(":")[0] for row in devices() if "why_not" not in row):
        probe = torch.zeros(2, 2, device=device)
        for op, candidates in dispatch.backends().items():
            served = False
            for backend in candidates:
                status, why = _ask(backend, probe)
                if status == "ready" and not served:
                    status, served = "serves", True
                rows.append({"op": op, "device": device, "backend": backend.name, "status": status, "why": why})
    return rows


def _ask(backend: dispatch.Backend, probe: torch.Tensor) -> tuple[str, str]:
    try:
        reason = backend.why_not(probe)
    except Exception:
        # One matrix is not what every op takes; what it says of real arguments can't be known here.
        return "depends", backend.about
    return ("ready", backend.about) if reason is None else ("not here", reason)
