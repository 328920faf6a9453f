"""What code written for geotorch relies on, for every map: the same properties, in our names.

A map is a module that can be registered by hand, assigned to, sampled, cached and removed, and
manifolds refuse what is
not on them.
"""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import cwy
from tests.helpers.methods import Layer, data, every_map, free_of, loss_of, make


@every_map
def test_a_map_is_registered_by_hand(name, size, dtype):
    made = make(name, size, dtype)
    layer = Layer(size, dtype)
    with torch.no_grad():
        layer.weight.copy_(made.weight)
    *batch, rows, columns = size
    chart = cwy.METHODS[name].build(
        max(rows, columns), min(rows, columns), batch=batch, dtype=dtype
    )
    chart.wide = rows < columns
    try:
        parametrize.register_parametrization(layer, "weight", chart)
    except ValueError:
        with pytest.raises(ValueError, match=r"n=\d"):
            made.weight = made.weight.detach()
        return
    torch.testing.assert_close(layer.weight, made.weight, atol=1e-10, rtol=0)


@every_map
def test_a_cached_weight_is_computed_once_and_has_its_gradient(name, size, dtype):
    layer, x = make(name, size, dtype), data(size, dtype)
    loss_of(layer, x).backward()
    expected = [p.grad.clone() for p in free_of(layer)]
    layer.zero_grad()
    with parametrize.cached():
        assert layer.weight is layer.weight
        loss_of(layer, x).backward()
    for parameter, gradient in zip(free_of(layer), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@every_map
def test_a_removed_map_leaves_the_weight(name, size, dtype):
    layer = make(name, size, dtype)
    weight = layer.weight.detach().clone()
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    assert type(layer) is Layer
    assert torch.equal(layer.weight, weight)
    assert list(layer.state_dict()) == ["weight"]


@every_map
def test_what_is_not_on_the_manifold_is_refused(name, size, dtype):
    layer = make(name, size, dtype)
    weight = layer.weight.detach().clone()
    for off in (torch.zeros_like(weight), weight + 0.5, weight[..., :1, :].expand_as(weight)):
        if cwy.orthogonality_error(off) < 1e-6:
            continue
        with pytest.raises(ValueError, match=r"n=\d"):
            layer.weight = off
    assert torch.equal(layer.weight, weight)


@pytest.mark.parametrize("shape", [(5, 5), (8, 3), (3, 8)])
def test_layers_of_a_model_train_together(shape):
    rows, columns = shape
    model = nn.Sequential(
        cwy.orthogonal(nn.Linear(columns, rows)),
        nn.Tanh(),
        cwy.orthogonal(nn.Linear(rows, columns)),
        nn.Tanh(),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = torch.randn(16, columns), torch.randn(16, columns)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with parametrize.cached():
            loss = (model(x) - y).square().mean()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert max(cwy.orthogonality_error(model[i].weight) for i in (0, 2)) <= 1e-5
