"""Many processes as one: each rank takes its share of every batch, and all stop at the same step.

``torchrun`` starts them. In a single process everything here does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .task import Batch


class Group:
    """Describe the processes of a run.

    Attributes:
        rank, size: the number of this process, and how many there are.
        device: the device of this process.
    """

    def __init__(self, device: str) -> None:
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        self._asked = torch.zeros(1, dtype=torch.int64)
        self._pending: dist.Work | None = None

    @property
    def first(self) -> bool:
        """Return whether this process writes and prints."""
        return self.rank == 0

    @contextmanager
    def joined(self) -> Generator[None]:
        """Connect the processes inside this context."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.size == 1:
            yield
            return
        backend = "gloo"
        if self.device.type == "cuda":
            # Numbers on the host go by gloo, so that agreeing does not wait for the GPU.
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend)
        try:
            yield
        finally:
            if self._pending is not None:
                self._pending.wait()
            dist.destroy_process_group()

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model with gradients averaged over the ranks."""
        if self.size == 1:
            return model
        return DistributedDataParallel(model)

    def share(self, batch: Batch) -> tuple[Batch, float]:
        """Return this rank's examples of a batch, and their weight.

        With these weights the mean over ranks is the mean over the batch. A rank without examples
        takes one with weight 0, because every rank must take part in the backward pass.
        """
        if self.size == 1:
            return batch, 1.0
        total = len(batch[0])
        rows = range(self.rank, total, self.size)
        mine = slice(self.rank, None, self.size)
        if not rows:
            mine = slice(1)
        return tuple(part[mine] for part in batch), len(rows) * self.size / total

    def agree_to_stop(self, signal: int) -> int:
        """Return a signal that some rank has heard, or 0. All ranks get the same answer.

        The question of one step is answered at the next, so that no rank waits for it.
        """
        if self.size == 1:
            return signal
        answer = 0
        if self._pending is not None:
            self._pending.wait()
            answer = int(self._asked)
        self._asked.fill_(signal)
        self._pending = dist.all_reduce(self._asked, dist.ReduceOp.MAX, async_op=True)
        return answer

    def mean(self, values: Tensor) -> Tensor:
        """Compute the mean over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
            values /= self.size
        return values

    def gather(self, value: Tensor) -> list[Tensor]:
        """Return a host tensor from every rank."""
        if self.size == 1:
            return [value]
        found = [torch.empty_like(value) for _ in range(self.size)]
        dist.all_gather(found, value)
        return found

    def wait(self) -> None:
        """Return when every rank has called this."""
        self.gather(torch.zeros(1))

    def broadcast(self, content: bytes) -> bytes:
        """Return the first rank's bytes on every rank."""
        if self.size == 1:
            return content
        length = torch.tensor([len(content)])
        dist.broadcast(length, 0)
        data = torch.empty(int(length), dtype=torch.uint8)
        if self.first and content:
            data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        dist.broadcast(data, 0)
        return data.numpy().tobytes()
