"""Layers of every registered method, in every shape and field that it serves."""

from pathlib import Path

import pytest
import torch
from torch import nn

import cwy

GOLDEN = Path(__file__).parent.parent / "golden" / "state_dict_keys.json"
SHAPES = {
    "square": (6, 6),
    "odd": (7, 7),
    "tall": (9, 4),
    "wide": (4, 9),
    "batched": (2, 6, 6),
    "batched tall": (3, 7, 3),
}


class Layer(nn.Module):
    """A module with one matrix parameter, or a batch of them."""

    def __init__(self, shape, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, dtype=dtype))

    def forward(self, x):
        return x @ self.weight.mT


def cases():
    for name, method in cwy.METHODS.items():
        for shape, size in SHAPES.items():
            square = size[-1] == size[-2]
            if method.kind == ("tall" if square else "square"):
                continue
            for dtype in (torch.float64, torch.complex128):
                if method.complex if dtype.is_complex else method.real:
                    yield pytest.param(
                        name,
                        size,
                        dtype,
                        id=f"{name}-{shape}-{'complex' if dtype.is_complex else 'real'}",
                    )


CASES = list(cases())
every_method = pytest.mark.parametrize(("name", "size", "dtype"), CASES)
# Of those whose weight is computed from free parameters; the others' weight is the parameter.
every_map = pytest.mark.parametrize(
    ("name", "size", "dtype"), [c for c in CASES if not cwy.METHODS[c.values[0]].on_manifold]
)
# One case a method and field suffices where a compiler or training loop is at work.
FIRST = list({(c.values[0], c.values[2]): c for c in reversed(CASES)}.values())
one_shape = pytest.mark.parametrize(("name", "size", "dtype"), FIRST)


def make(name, size, dtype, **options):
    return cwy.orthogonal(Layer(size, dtype), method=name, **options)


def free_of(layer):
    chain = layer.parametrizations.weight
    return (
        [chain.original]
        if chain.is_tensor
        else [getattr(chain, f"original{i}") for i in range(chain.ntensors)]
    )


def loss_of(layer, x):
    return layer(x).abs().square().mean() + layer.weight.real[..., 0, 0].sum()


def data(size, dtype, device="cpu"):
    return torch.randn(*size[:-2], 5, size[-1], dtype=dtype, device=device)


def train(layer, x, steps, **options):
    optimizer = cwy.optim.for_model(layer, lr=1e-2, optimizer=torch.optim.AdamW, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(layer, x).backward()
        optimizer.step()
