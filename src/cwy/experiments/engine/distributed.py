"""Many processes as one: each rank takes its share of every batch, and all stop at the same step.

Started by ``torchrun``; alone, everything here does nothing.
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
    """The processes of a run.

    Attributes:
        rank, size: this process's number, and how many there are.
        device: this process's own.
    """

    def __init__(self, device: str) -> None:
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        self._asked = torch.zeros(1, dtype=torch.int64)
        self._pending: dist.Work | None = None

    @property
    def first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    @contextmanager
    def joined(self) -> Generator[None]:
        """The processes find each other; afterwards they part."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.size == 1:
            yield
            return
        # Numbers on the host go by gloo, so that nobody waits for the GPU to agree on something.
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")
        try:
            yield
        finally:
            if self._pending is not None:
                self._pending.wait()
            dist.destroy_process_group()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model, its gradients averaged over the ranks in every backward."""
        return model if self.size == 1 else DistributedDataParallel(model)

    def share(self, batch: Batch) -> tuple[Batch, float]:
        """This rank's examples of a batch, and the weight that makes the mean over ranks that over the batch.

        A rank for which none are left takes one with weight 0: every rank must take part in the backward.
        """
        if self.size == 1:
            return batch, 1.0
        total = len(batch[0])
        rows = range(self.rank, total, self.size)
        mine = tuple(part[self.rank :: self.size] if rows else part[:1] for part in batch)
        return mine, len(rows) * self.size / total

    def agree_to_stop(self, signal: int) -> int:
        """A signal that some rank has heard, 0 if none: every rank gets the same answer at the same step.

        The question of one step is answered at the next, so that nobody waits for it.
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
        """The mean over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
            values /= self.size
        return values

    def gather(self, value: Tensor) -> list[Tensor]:
        """A tensor of the host from every rank."""
        if self.size == 1:
            return [value]
        found = [torch.empty_like(value) for _ in range(self.size)]
        dist.all_gather(found, value)
        return found

    def wait(self) -> None:
        """Returns when every rank has called it."""
        self.gather(torch.zeros(1))

    def broadcast(self, content: bytes) -> bytes:
        """The first rank's bytes, for all; what the others give is ignored."""
        if self.size == 1:
            return content
        length = torch.tensor([len(content)])
        dist.broadcast(length, 0)
        data = torch.empty(int(length), dtype=torch.uint8)
        if self.first and content:
            data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        dist.broadcast(data, 0)
        return data.numpy().tobytes()
