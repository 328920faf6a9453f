"""The record of plain steps: what it times, and what it states."""

import pytest
import torch

from cwy.bench.suites import plain

SIZES = ((8, 2, 4), (8, 8, 3, 2, 5))


def lines(device, monkeypatch):
    monkeypatch.setattr(plain, "SAMPLES", 3)
    monkeypatch.setattr(plain, "IN_A_ROW", 2)
    return [*plain.record(SIZES, torch.device(device), "the command")]


def test_the_record_has_every_entry_and_its_command(monkeypatch):
    found = lines("cpu", monkeypatch)
    assert "the command\n" in found
    timed = [line.partition(":")[0] for line in found if " wall " in line]
    stacks = [f"8x2x4 {name}" for name in plain.SHOWN]
    recurrences = [f"8x8x3x2x5 {name}" for name in plain.SHOWN if "together" not in name]
    assert timed == [*stacks, *recurrences]


def test_a_step_waits_for_the_device_after_the_host_is_done():
    times = plain.take_times(lambda: None, torch.device("cpu"))
    assert 0 < times.host <= times.wall < 1


@pytest.mark.gpu
def test_kernels_are_counted(monkeypatch):
    found = lines("cuda", monkeypatch)
    totals = [line for line in found if line.startswith("  device ")]
    assert len(totals) == sum(" wall " in line for line in found)
    assert all(int(line.split()[-2]) > 3 for line in totals)
