"""What torch does with registered maps: transfers them to other modules, swaps their parameters."""

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig, prepare_qat
from torch.nn.utils import parametrize

import cwy
from tests.helpers.methods import Layer, data, every_map, make, train


@every_map
@pytest.mark.parametrize("target", ["random", "orthogonal", "absent"])
def test_a_transfer_gives_the_weight_and_leaves_the_source_alone(name, size, dtype, target):
    source = make(name, size, dtype)
    before = source.state_dict()
    if "parametrizations.weight.0.signs" in before:
        # Signs that no new map has: a transfer that touched them would show.
        before["parametrizations.weight.0.signs"][..., 0] *= -1
    before = {key: value.clone() for key, value in before.items()}
    weight = source.weight.detach().clone()
    other = Layer(size, dtype)
    if target == "orthogonal":
        other.weight.data = make(name, size, dtype).weight.detach().clone()
    elif target == "absent":
        del other.weight

    parametrize.transfer_parametrizations_and_params(source, other)
    assert torch.equal(other.weight, weight)
    assert torch.equal(source.weight, weight)
    assert all(torch.equal(value, before[key]) for key, value in source.state_dict().items())
    # torch shares the free parameters, so the map's state stays with them: both modules keep one
    # weight.
    train(other, data(size, dtype), 2)
    assert torch.equal(source.weight, other.weight)
    assert cwy.orthogonality_error(other.weight) <= 1e-12


@pytest.mark.filterwarnings("ignore")  # torch.ao announces its successor
def test_quantization_aware_training_keeps_the_weight_orthogonal():
    model = nn.Sequential(cwy.orthogonal(nn.Linear(8, 8), init="haar"), nn.Tanh(), nn.Linear(8, 4))
    weight = model[0].weight.detach().clone()
    model.qconfig = get_default_qat_qconfig("x86")
    prepared = prepare_qat(model.train())
    assert torch.equal(prepared[0].weight, weight)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        prepared(torch.randn(5, 8)).square().sum().backward()
        optimizer.step()
    assert (prepared[0].weight - weight).abs().max() > 1e-3
    assert cwy.orthogonality_error(prepared[0].weight) <= 1e-5
    assert torch.equal(model[0].weight, weight), "prepare_qat made a copy"


@pytest.fixture
def _swapping():
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.usefixtures("_swapping")
@pytest.mark.parametrize(
    "make_layer", [lambda: nn.Conv2d(2, 8, 2), lambda: nn.ConvTranspose1d(3, 2, 4)]
)
@pytest.mark.parametrize("name", ["cwy", "tcwy", "hr", "rgd"])
def test_convolutions_when_torch_swaps_parameters(name, make_layer):
    layer = cwy.orthogonal(make_layer(), method=name)
    layer.double()
    x = torch.randn(2, layer.in_channels, *[5] * (layer.weight.dim() - 2), dtype=torch.float64)
    layer(x).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    assert cwy.orthogonality_error(layer.weight.flatten(1)) <= 1e-5
