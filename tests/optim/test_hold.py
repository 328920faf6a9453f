"""Vectors whose length an optimizer may not change: what is held, that Q stays, and that training
settles.
"""

import copy

import pytest
import torch
from torch import nn

import cwy
from cwy.optim import for_model, hold_length

# Which lengths a method has: the dimensions along which one vector lies, by the place of the free
# parameter.
HELD = {
    "cwy": {0: (-2,)},
    "tcwy": {0: (-2,)},
    "hr": {0: (-2,)},
    "urnn": {1: (-1,)},
    "own": {0: (-2, -1)},
}


class Layer(nn.Module):
    def __init__(self, rows, columns, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, rows, columns, dtype=dtype))


def make(method, dtype):
    rows = 7 if cwy.METHODS[method].kind == "tall" else 4
    layer = cwy.orthogonal(Layer(rows, 4, dtype), method=method)
    return layer, list(layer.parametrizations.weight.parameters(recurse=False))


def lengths(x, dims):
    return torch.linalg.vector_norm(x.detach(), dim=dims) if dims else x.detach().abs()


def take_step(layer, optimizer):
    optimizer.zero_grad()
    target = torch.linspace(-1, 1, layer.weight.numel()).reshape(layer.weight.shape)
    (layer.weight - target).abs().square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128], ids=str)
@pytest.mark.parametrize("method", HELD)
def test_every_length_is_held_and_the_weight_is_what_the_optimizer_made(method, dtype):
    chosen = cwy.METHODS[method]
    if not (chosen.complex if dtype.is_complex else chosen.real):
        pytest.skip("the method has no such weight")
    layer, free = make(method, dtype)
    plain = copy.deepcopy(layer)
    options = {"lr": 0.1, "weight_decay": 1.0}
    optimizer = torch.optim.AdamW(layer.parameters(), **options)
    hold_length(optimizer, layer)
    held = HELD[method]
    if dtype.is_complex and method != "urnn":
        held = {**held, 1: ()}
    before = {place: lengths(free[place], dims) for place, dims in held.items()}
    take_step(layer, optimizer)
    take_step(plain, torch.optim.AdamW(plain.parameters(), **options))
    loose = (
        {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {"atol": 1e-5, "rtol": 1e-5}
    )
    torch.testing.assert_close(layer.weight, plain.weight, **loose)
    for place, dims in held.items():
        torch.testing.assert_close(lengths(free[place], dims), before[place], **loose)


@pytest.mark.parametrize("size", [1e-30, 1e30, 0.0])
def test_vectors_of_any_size_stay_finite(size):
    layer, (v,) = make("cwy", torch.float32)
    with torch.no_grad():
        v.mul_(size)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, weight_decay=1.0)
    hold_length(optimizer, layer)
    expected = v.detach().abs().max()
    before = layer.weight.detach().clone()
    v.grad = torch.zeros_like(v)
    optimizer.step()
    torch.testing.assert_close(v.detach().abs().max(), expected)
    torch.testing.assert_close(layer.weight.detach(), before)


@pytest.mark.parametrize(("kind", "lr"), [(torch.optim.AdamW, 0.02), (torch.optim.SGD, 0.04)])
def test_training_settles_under_any_decay(kind, lr):
    """Without holding, a decay of 1 moves Q by 1.9 per step at the end (AdamW) and by 3.8 (SGD)."""

    def largest_of_the_last_steps(make_optimizer):
        torch.manual_seed(0)
        layer = cwy.orthogonal(nn.Linear(5, 5, bias=False, dtype=torch.float64))
        q, r = torch.linalg.qr(layer.weight.detach() + 0.3 * torch.randn(5, 5, dtype=torch.float64))
        target = q * r.diagonal().sign()
        optimizer = make_optimizer(layer)
        moves = []
        for _ in range(300):
            before = layer.weight.detach()
            optimizer.zero_grad()
            (layer.weight - target).square().sum().backward()
            optimizer.step()
            moves.append((layer.weight.detach() - before).norm().item())
        return max(moves[-20:])

    def by_hand(decay, hold):
        def build(layer):
            optimizer = kind(layer.parameters(), lr=lr, weight_decay=decay)
            if hold:
                hold_length(optimizer, layer)
            return optimizer

        return build

    assert largest_of_the_last_steps(by_hand(1.0, hold=False)) > 0.1, (
        "the problem is one that decay spoils"
    )
    for decay in (1.0, 5.0):
        assert largest_of_the_last_steps(by_hand(decay, hold=True)) < 1e-4
    told = {"optimizer": kind, "orthogonal_weight_decay": 100.0, "hold_length": True}
    assert largest_of_the_last_steps(lambda layer: for_model(layer, lr, **told)) < 1e-4


def test_the_lengths_of_a_loaded_weight_are_held():
    layer, (v,) = make("cwy", torch.float64)
    optimizer = for_model(layer, 0.1, hold_length=True)
    take_step(layer, optimizer)
    state = layer.state_dict()
    state["parametrizations.weight.original"] = 3 * state["parametrizations.weight.original"]
    layer.load_state_dict(state)
    optimizer.load_state_dict(for_model(layer, 0.1).state_dict())
    before = lengths(v, (-2,))
    take_step(layer, optimizer)
    torch.testing.assert_close(lengths(v, (-2,)), before)


@pytest.mark.gpu
def test_in_a_cuda_graph_without_synchronization():
    layer = cwy.orthogonal(nn.Linear(8, 8, device="cuda"))
    optimizer = for_model(
        layer, 0.1, optimizer=torch.optim.AdamW, capturable=True, weight_decay=1.0, hold_length=True
    )
    v = layer.parametrizations.weight.original
    before = lengths(v, (-2,))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            take_gpu_step(layer, optimizer)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        take_gpu_step(layer, optimizer)
    start = layer.weight.detach().clone()
    for _ in range(5):
        graph.replay()
    assert (layer.weight - start).abs().max() > 1e-2
    torch.testing.assert_close(lengths(v, (-2,)), before)


def take_gpu_step(layer, optimizer):
    optimizer.zero_grad()
    layer.weight[0].sum().backward()
    optimizer.step()
