"""Two gloo processes equal one, in float64: DDP and FSDP2."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cwy
from cwy.many import run_together

pytestmark = pytest.mark.slow

STEPS = 4


def make_model(wrap):
    torch.manual_seed(0)
    kwargs = {"dtype": torch.float64}
    # A weight on the manifold is not for sharding.
    moved = []
    if wrap == "ddp":
        layer = nn.Linear(8, 8, **kwargs)
        moved.append(cwy.orthogonal(layer, method="rgd-c-c", momentum=0.9))
    model = nn.Sequential(
        *moved,
        cwy.orthogonal(nn.Linear(8, 8, **kwargs), init="haar"),
        nn.Tanh(),
        cwy.orthogonal(nn.Linear(8, 8, **kwargs)),
        cwy.orthogonal(nn.Linear(8, 5, **kwargs)),
        cwy.orthogonal(nn.Linear(5, 5, **kwargs), reflections=2, init="identity"),
        Recurrent(),
    )
    # The two layers of one kind are computed together, except where parameters are sharded.
    return run_together(model)


class Recurrent(nn.Module):
    """A recurrent layer over the features, so that the layers stay a sequence."""

    def __init__(self):
        super().__init__()
        self.rnn = cwy.nn.OrthogonalRNN(
            1, 5, nonlinearity="modrelu", batch_first=True, dtype=torch.float64
        )

    def forward(self, x):
        return self.rnn(x.unsqueeze(-1))[0][:, -1]


def batch(step):
    return torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def train(model, rows):
    optimizer = cwy.optim.for_model(model, lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step)[rows]).square().sum(-1).mean().backward()
        optimizer.step()


def weights(model):
    return [layer.weight.detach() for layer in model if hasattr(layer, "weight")] + [
        model[-1].rnn.weight_hh_l0.detach()
    ]


def worker(rank, port, wrap, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = make_model(wrap)
    rows = slice(rank, None, 2)
    if wrap == "ddp":
        train(DistributedDataParallel(model), rows)
    else:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        moved = fully_shard(cwy.orthogonal(nn.Linear(4, 4), method="rgd-c-c"), mesh=mesh)
        with pytest.raises(ValueError, match=r"'weight' \(4, 4\) is sharded.*DDP"):
            cwy.optim.for_model(moved)
        for layer in model:
            if isinstance(layer, Recurrent) or hasattr(layer, "weight"):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        train(model, rows)
        for module in model.modules():
            if hasattr(module, "unshard"):
                module.unshard()
    torch.save(weights(model), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    if wrap == "fsdp2":
        # FSDP2 keeps its process groups. Their threads may abort a process that ends by itself.
        os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_two_processes_equal_one(wrap, tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(worker, (port, wrap, str(tmp_path)), nprocs=2)
    alone = make_model(wrap)
    train(alone, slice(None))
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for a, b, one in zip(first, second, weights(alone), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, one, atol=1e-6, rtol=0)
