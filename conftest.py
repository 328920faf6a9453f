"""Shared by the tests and the docstring examples."""

import os
import signal

# Before torch loads: some CPUs announce bf16 instructions that oneDNN then crashes on.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import settings

import cwy

settings.register_profile("cwy", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("cwy")

# Scripts for type checkers, with mistakes: not to be imported.
collect_ignore_glob = ["tests/users/*"]

# Workers share the cores.
torch.set_num_threads(1)

# A shell starts what runs in the background with Ctrl-C ignored, and children inherit that; tests
# send it to them.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _names(doctest_namespace):
    doctest_namespace.update({name: getattr(cwy, name) for name in cwy.__all__}, torch=torch)
    doctest_namespace.update({name: getattr(cwy.ops, name) for name in cwy.ops.__all__})


def pytest_addoption(parser):
    text = "run at most N cases of each parametrized test, evenly chosen"
    parser.addoption("--cases", type=int, metavar="N", help=text)


@pytest.hookimpl(trylast=True)  # after -m
def pytest_collection_modifyitems(config, items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    most = config.getoption("--cases")
    if most is None:
        return
    cases = {}
    for item in items:
        if not item.get_closest_marker("gpu"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = set()
    for alike in cases.values():
        step = max(1, len(alike) / most)
        chosen.update(alike[int(number * step)] for number in range(min(most, len(alike))))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]
