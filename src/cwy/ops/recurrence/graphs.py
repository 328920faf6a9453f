"""Loops over time as CUDA graphs: many small launches become one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..precision import of_convolutions

BLOCKS = (128, 16)  # steps a graph; what is left over runs step by step
_KEPT = 64

_graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
_lock = threading.Lock()
_held_off = 0


class _Graph:
    """A function of tensors, recorded once for their shapes and replayed on copies of them."""

    def __init__(self, fn: Callable[..., tuple[Tensor, ...]], given: tuple[Tensor, ...]) -> None:
        self._given = tuple(t.clone() for t in given)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            fn(*self._given)  # libraries make their handles and workspaces outside the recording
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._made = fn(*self._given)

    def __call__(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for ours, theirs in zip(self._given, given, strict=True):
            ours.copy_(theirs)
        self._graph.replay()
        return self._made


@contextmanager
def off() -> Iterator[None]:
    """Nothing is recorded or replayed inside, in any thread: for a caller who is about to record the whole."""
    global _held_off
    _held_off += 1
    try:
        yield
    finally:
        _held_off -= 1


def worth(x: Tensor, sizes: list[int]) -> bool:
    """Whether steps of equal size on a GPU can be recorded: not while the caller is recording a graph of its own."""
    if not x.is_cuda or _held_off or torch.cuda.is_current_stream_capturing():
        return False
    return len(sizes) >= BLOCKS[-1] and sizes[0] == sizes[-1]


def blocks(steps: int) -> Iterator[tuple[int, int]]:
    """(start, count) of the pieces in which so many steps are run; those of a size in BLOCKS are recorded."""
    start = 0
    for size in (*BLOCKS, 1):
        while steps - start >= size:
            count = size if size > 1 else steps - start
            yield start, count
            start += count


def replay(
    fn: Callable[..., tuple[Tensor, ...]], key: Hashable, given: tuple[Tensor, ...], into: tuple[Tensor | None, ...]
) -> tuple[Tensor, ...]:
    """``fn(*given)`` by its graph, copied into these tensors, or into new ones for None."""
    stream = torch.cuda.current_stream(given[0].device)
    flag = of_convolutions() if given[0].dim() == 4 else None  # a recording keeps it
    key = key, stream, flag, *((t.shape, t.stride(), t.dtype, t.device) for t in given)
    with _lock, torch.cuda.device(given[0].device):
        if key not in _graphs:
            _graphs[key] = _Graph(fn, given)
            if len(_graphs) > _KEPT:
                _graphs.popitem(last=False)
        _graphs.move_to_end(key)
        # The next replay, perhaps of another thread, overwrites them.
        return tuple(m.clone() if out is None else out.copy_(m) for m, out in zip(_graphs[key](given), into, strict=True))
