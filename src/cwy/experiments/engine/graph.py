"""A training step as a CUDA graph for each shape of batch: hundreds of small launches become one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext

import torch

from ...ops.recurrence import graphs
from .task import Batch

WARM = 3
"""Steps of a shape that run as they are first, so that nothing is loaded or compiled while the graph is recorded."""
KEPT = 64
"""Graphs that are kept; further shapes run as they are."""

Shape = tuple[torch.Size, ...]


class Step:
    """Runs a step, ``step(batch)``, as it is, or, once it is warm, by the graph that was recorded of it.

    Args:
        step: reads the batch and tensors that stay where they are, leaves no new ones behind, and waits for nothing.
        wanted: whether to record it. What can't be recorded runs as it is.
        undo: called when a recording has failed, to drop the gradients that it may have left.
    """

    def __init__(self, step: Callable[[Batch], None], wanted: bool, undo: Callable[[], None]) -> None:
        self._step, self._wanted, self._undo = step, wanted, undo
        self._seen: Counter[Shape] = Counter()
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, Batch]] = {}
        # One step is over before the next begins: the graphs can use the same memory.
        self._pool = torch.cuda.graph_pool_handle() if wanted else None

    @property
    def settled(self) -> bool:
        """Whether all that happens once is behind, but for shapes that come later."""
        return bool(self._graphs) or not self._wanted

    def __call__(self, batch: Batch) -> None:
        shape = tuple(part.shape for part in batch)
        if self._wanted and self._seen[shape] == WARM and len(self._graphs) < KEPT:
            self._record(shape, batch)
        self._seen[shape] += 1
        if shape not in self._graphs:
            # Graphs of its parts would only take memory beside that of the whole.
            with graphs.off() if self._wanted else nullcontext():
                return self._step(batch)
        graph, given = self._graphs[shape]
        for ours, theirs in zip(given, batch, strict=True):
            ours.copy_(theirs)
        graph.replay()
        return None

    def _record(self, shape: Shape, batch: Batch) -> None:
        given, graph = tuple(part.clone() for part in batch), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                self._step(given)
            self._graphs[shape] = graph, given
        except RuntimeError:
            # A step that waits for the device, as torch's matrix exponential does, can't be recorded.
            self._wanted = False
            self._undo()
            torch.cuda.synchronize()
