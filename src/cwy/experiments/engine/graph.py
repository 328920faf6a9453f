"""A training step as one CUDA graph: hundreds of small launches become one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .task import Batch

WARM = 3
"""Steps that run as they are first, so that nothing is loaded or compiled while the graph is recorded."""


class Step:
    """Runs a step, ``step(batch)``, as it is, or, once it is warm, by the graph that was recorded of it.

    Args:
        step: reads the batch and tensors that stay where they are, and waits for nothing.
        wanted: whether to record it. What can't be recorded runs as it is.
    """

    def __init__(self, step: Callable[[Batch], None], wanted: bool) -> None:
        self._step, self._left = step, WARM if wanted else -1
        self._graph: torch.cuda.CUDAGraph | None = None
        self._given: Batch = ()

    @property
    def recorded(self) -> bool:
        return self._graph is not None

    @property
    def settled(self) -> bool:
        """Whether all that happens once is behind."""
        return self.recorded or self._left < 0

    def __call__(self, batch: Batch) -> None:
        if self._left == 0:
            self._record(batch)
        self._left -= 1
        if self._graph is None or not self._fits(batch):
            return self._step(batch)
        for ours, theirs in zip(self._given, batch, strict=True):
            ours.copy_(theirs)
        self._graph.replay()
        return None

    def _fits(self, batch: Batch) -> bool:
        """The last batch of an epoch may be smaller."""
        return all(ours.shape == theirs.shape for ours, theirs in zip(self._given, batch, strict=True))

    def _record(self, batch: Batch) -> None:
        self._given, graph = tuple(part.clone() for part in batch), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._step(self._given)
            self._graph = graph
        except RuntimeError:
            # A step that waits for the device, as torch's matrix exponential does, can't be recorded.
            torch.cuda.synchronize()
