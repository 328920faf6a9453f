"""Calls captured in CUDA graphs: a replay takes what the kernels take, without the host."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...ops.recurrence import graphs


@dataclass(frozen=True)
class Recorded:
    """Hold a captured call. Each replay overwrites ``result``."""

    graph: torch.cuda.CUDAGraph
    result: Any

    def replay(self) -> None:
        """Run the kernels again."""
        self.graph.replay()


def record(call: Callable[[], Any], device: torch.device) -> Recorded | str:
    """Capture a call whose inputs stay where they are.

    Returns:
        The captured call or, if it cannot be captured, as when it synchronizes, why not.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        try:
            # A graph cannot hold other graphs: they are left out from the start.
            with graphs.off():
                _warm_up(call)
                with torch.cuda.graph(graph):
                    result = call()
        except RuntimeError as error:
            _recover(stream)
            return str(error).strip().partition("\n")[0] or "it can't be recorded"
        recorded = Recorded(graph, result)
        recorded.replay()
        return recorded


def _warm_up(call: Callable[[], object]) -> None:
    """Run a call on another stream, as the capture does. Raise if it synchronizes."""
    side = torch.cuda.Stream()
    mode = torch.cuda.get_sync_debug_mode()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), warnings.catch_warnings():
        # That the mode is a prototype.
        warnings.simplefilter("ignore")
        call()
        try:
            # Asked before the capture, because one that fails leaves much to mend.
            torch.cuda.set_sync_debug_mode("error")
            call()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.current_stream().wait_stream(side)


def _recover(stream: torch.cuda.Stream) -> None:
    """Undo what a failed capture leaves behind: its stream, and a generator in capture mode."""
    torch.cuda.set_stream(stream)
    torch.cuda.synchronize()
    index = torch.cuda.current_device()
    fresh = torch.Generator(f"cuda:{index}")
    torch.cuda.default_generators[index].graphsafe_set_state(fresh)
