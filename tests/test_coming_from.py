"""What the page on coming from other libraries states, tested with those libraries."""

import io

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import cwy

STEPS = 5


def torch_layer(orthogonal_map):
    def make(rows, columns):
        layer = nn.Linear(columns, rows, dtype=torch.float64)
        return parametrizations.orthogonal(layer, orthogonal_map=orthogonal_map)

    return make


def geotorch_layer(triv):
    def make(rows, columns):
        geotorch = pytest.importorskip("geotorch")
        layer = nn.Linear(columns, rows, dtype=torch.float64)
        geotorch.orthogonal(layer, "weight", triv)
        return layer

    return make


LAYERS = {
    "torch exponential": torch_layer("matrix_exp"),
    "torch Cayley": torch_layer("cayley"),
    "torch Householder": torch_layer("householder"),
    "geotorch exponential": geotorch_layer("expm"),
    "geotorch Cayley": geotorch_layer("cayley"),
}


def train(layer):
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        layer(torch.randn(6, layer.in_features, dtype=torch.float64)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("shape", [(9, 9), (9, 4), (4, 9)])
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_an_old_checkpoint_gives_the_same_layer(make, shape):
    torch.manual_seed(0)
    old = make(*shape)
    train(old)
    file = io.BytesIO()
    torch.save(old.state_dict(), file)
    file.seek(0)
    layer = make(*shape)
    layer.load_state_dict(torch.load(file))
    parametrize.remove_parametrizations(layer, "weight")
    cwy.orthogonal(layer)
    assert torch.allclose(layer.weight, old.weight, atol=1e-12)
    x = torch.randn(3, shape[1], dtype=torch.float64)
    assert torch.allclose(layer(x), old(x), atol=1e-11)


@pytest.mark.parametrize("method", ["cwy", "rgd-adam"])
def test_a_checkpoint_of_geoopt_loads_under_its_own_name(method):
    geoopt = pytest.importorskip("geoopt")
    torch.manual_seed(0)
    manifold = geoopt.Stiefel()
    weight = geoopt.ManifoldParameter(manifold.random(12, 5), manifold=manifold)
    optimizer = geoopt.optim.RiemannianAdam([weight], lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (weight * torch.randn(12, 5)).sum().backward()
        optimizer.step()
    layer = cwy.orthogonal(nn.Linear(5, 12, bias=False), method=method)
    layer.load_state_dict({"weight": weight.data})
    assert torch.allclose(layer.weight, weight, atol=1e-5)


def first_step(layer, lr=1e-5):
    """Return how far Adam's first step moves a weight, in steps of a free weight."""
    before = layer.weight.detach().clone()
    optimizer = torch.optim.Adam(layer.parameters(), lr=lr)
    (layer.weight * torch.randn_like(before)).sum().backward()
    optimizer.step()
    return (layer.weight - before).norm().item() / (lr * before.numel() ** 0.5)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_learning_rates_carry_over(make):
    torch.manual_seed(0)
    layer = make(64, 64)
    expected = 1.0
    if make is LAYERS["torch Householder"]:
        expected = 2.0
    assert first_step(layer) == pytest.approx(expected, rel=0.05)
    ours = cwy.orthogonal(nn.Linear(64, 64, dtype=torch.float64))
    assert first_step(ours) == pytest.approx(1.0, rel=0.05)


def steps_from(start, gradients, make):
    weight, optimizer = make(start.clone())
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


def test_the_euclidean_metric_with_qr_takes_the_steps_of_geoopt():
    geoopt = pytest.importorskip("geoopt")
    torch.manual_seed(0)
    start = cwy.init.haar(12, 5, dtype=torch.float64)
    gradients = torch.randn(STEPS, 12, 5, dtype=torch.float64)

    def theirs(point):
        weight = geoopt.ManifoldParameter(point, manifold=geoopt.EuclideanStiefel())
        return weight, geoopt.optim.RiemannianSGD([weight], lr=0.05)

    def ours(point):
        weight = nn.Parameter(point)
        options = {"metric": "euclidean", "retraction": "qr"}
        return weight, cwy.optim.StiefelSGD([weight], lr=0.05, **options)

    expected = steps_from(start, gradients, theirs)
    assert torch.allclose(steps_from(start, gradients, ours), expected, atol=1e-13)


def test_random_starts_have_the_determinants_of_the_page():
    geotorch = pytest.importorskip("geotorch")
    for _ in range(5):
        theirs = nn.Linear(6, 6)
        geotorch.orthogonal(theirs, "weight")
        assert torch.linalg.det(theirs.weight) > 0
        assert torch.linalg.det(cwy.orthogonal(nn.Linear(6, 6)).weight) > 0
        assert torch.linalg.det(cwy.orthogonal(nn.Linear(5, 5)).weight) < 0
