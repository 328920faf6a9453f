"""A call as a CUDA graph: replayed, it takes what its kernels take, without the host that launches them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..ops.recurrence import graphs


@dataclass(frozen=True)
class Recorded:
    """A graph; each replay overwrites ``result``, that of the call it was recorded of."""

    graph: torch.cuda.CUDAGraph
    result: Any

    def replay(self) -> None:
        self.graph.replay()


def record(call: Callable[[], Any], device: torch.device) -> Recorded | str:
    """Records a call whose inputs stay where they are; if it can't be, as when it waits for the device, says why."""
    with torch.cuda.device(device):
        stream, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        try:
            # Graphs within a graph can't be; they are left out from the start.
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
    """Runs a call on another stream, as the recording does; raises if torch waits for the device in it."""
    side, mode = torch.cuda.Stream(), torch.cuda.get_sync_debug_mode()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), warnings.catch_warnings():
        # That the mode is a prototype.
        warnings.simplefilter("ignore")
        call()
        try:
            # Asked before a recording, because one that fails leaves much to mend.
            torch.cuda.set_sync_debug_mode("error")
            call()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.current_stream().wait_stream(side)


def _recover(stream: torch.cuda.Stream) -> None:
    """Takes back what a failed recording leaves behind: its stream, and a generator that believes it is still recorded."""
    torch.cuda.set_stream(stream)
    torch.cuda.synchronize()
    index = torch.cuda.current_device()
    torch.cuda.default_generators[index].graphsafe_set_state(torch.Generator(f"cuda:{index}"))
