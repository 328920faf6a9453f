"""Loops over time in CUDA graphs: many small launches become one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator

import torch
from torch import Tensor

from ... import cudagraph

BLOCKS = (128, 16)
"""Steps of a graph. What is left over runs step by step."""
MAX_GRAPHS = 64
"""Graphs that are kept. The one that was not used for longest goes first."""

_graphs: OrderedDict[Hashable, cudagraph.CapturedCall] = OrderedDict()
_lock = threading.Lock()


def worth(x: Tensor, sizes: list[int]) -> bool:
    """Return whether these steps can be captured: they have equal sizes and run on a GPU.

    A caller who captures a graph of its own gets the steps themselves.
    """
    if not x.is_cuda or not cudagraph.may_capture():
        return False
    return len(sizes) >= BLOCKS[-1] and sizes[0] == sizes[-1]


def blocks(steps: int) -> Iterator[tuple[int, int]]:
    """Yield (start, count) of the pieces in which so many steps run.

    The pieces whose size is in :data:`BLOCKS` are captured.
    """
    start = 0
    for size in BLOCKS:
        while steps - start >= size:
            yield start, size
            start += size
    if start < steps:
        yield start, steps - start


def replay(
    call: Callable[..., tuple[Tensor, ...]],
    key: Hashable,
    inputs: tuple[Tensor, ...],
    into: tuple[Tensor | None, ...],
) -> tuple[Tensor, ...]:
    """Run ``call(*inputs)`` by its graph.

    Args:
        call: a function of tensors that returns tensors.
        key: what the graph depends on, apart from the layout of its inputs.
        inputs: copied into the graph.
        into: where each result goes. None means a new tensor.

    Returns:
        The results.
    """
    device = inputs[0].device
    layouts = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in inputs]
    whole_key = (key, torch.cuda.current_stream(device), *layouts)
    with _lock, torch.cuda.device(device):
        if whole_key not in _graphs:
            _graphs[whole_key] = cudagraph.CapturedCall(call, inputs, warmup=1)
            if len(_graphs) > MAX_GRAPHS:
                _graphs.popitem(last=False)
        _graphs.move_to_end(whole_key)
        results = _graphs[whole_key](*inputs)
        # The next replay, perhaps of another thread, overwrites them.
        return tuple(_copied(result, target) for result, target in zip(results, into, strict=True))


def _copied(result: Tensor, target: Tensor | None) -> Tensor:
    if target is None:
        return result.clone()
    return target.copy_(result)
