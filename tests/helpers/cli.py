"""Commands as a user starts them: real processes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

COMMAND = shutil.which("cwy", path=str(Path(sys.executable).parent)) or "cwy"
"""The script that is installed with this Python."""
ENV = {**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}


def run(
    *arguments: str | Path, cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    env = {**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8", **env}
    return subprocess.run(
        [str(a) for a in arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )


def cwy(*args: object, ranks: int = 1, **options) -> subprocess.CompletedProcess[str]:
    """Run ``cwy`` to its end."""
    return subprocess.run(
        [*program(ranks), *map(str, args)], env=ENV, capture_output=True, text=True, **options
    )


def start(*args: object, ranks: int = 1, preexec_fn=None, **env: str) -> subprocess.Popen[str]:
    """Start ``cwy``."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [*program(ranks), *map(str, args)], env=ENV | env, preexec_fn=preexec_fn, **pipes
    )


def program(ranks: int) -> list[str]:
    """Return the command of ``cwy`` in so many processes."""
    torchrun = []
    if ranks > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *torchrun, "-m", "cwy"]
