"""Rows or a batch divided over 8 devices: the same results, and little that travels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jax import sharded

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_rows_and_batches_over_eight_devices():
    flags = os.environ.get("XLA_FLAGS", "")
    environment = os.environ | {
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.jax.sharded"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert max(report["gaps"].values()) <= 1e-12, report
    assert report["local rows"] == sharded.N // 8
    # Only L numbers per vector travel, once.
    assert report["by factors"] == [["all_reduce", [sharded.L, sharded.BATCH]]]
    # The factors cost sums of at most L x L.
    assert all(len(shape) >= 2 and shape[-1] == sharded.L for _, shape in report["factors"])
    assert {name for name, _ in report["factors"]} == {"all_reduce"}
