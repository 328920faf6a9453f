"""Find out what measured numbers belong to: versions, commit and device."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from ._version import __version__

OPTIONAL = ("numpy", "triton", "cuda-bindings", "nvidia-cuda-nvrtc", "typer", "rich", "matplotlib")
"""The packages whose versions a record and ``cwy info`` list."""


def versions() -> dict[str, str]:
    """Return the versions of cwy, Python, torch and the optional packages."""
    found = {"cwy": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in OPTIONAL:
        found[package] = version(package) or "not installed"
    return found


def version(package: str) -> str:
    """Return the version of a package, or an empty string if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def commit(source: Path = Path(__file__).parent) -> str:
    """Return the git commit of a source folder.

    "+dirty" is appended if the folder differs from the commit. The result is empty if git does
    not track the folder. The environment variable CWY_COMMIT comes first, for a copy of the source
    without its history.
    """
    stated = os.environ.get("CWY_COMMIT")
    if stated:
        return stated
    # An installed cwy may lie in a folder of somebody else's repository.
    if _git(source, "ls-files", "--error-unmatch", "__init__.py") is None:
        return ""
    name = _git(source, "rev-parse", "--short=12", "HEAD")
    if _git(source, "status", "--porcelain", "--", "."):
        return f"{name}+dirty"
    return f"{name}"


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints, or None if it fails or is not installed."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True)  # noqa: S603
    except OSError:
        return None
    if done.returncode != 0:
        return None
    return done.stdout.strip()


def device_name(device: torch.device) -> str:
    """Return the name of the GPU or the processor, as the system reports it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
