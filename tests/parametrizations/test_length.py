"""The length of the vectors: one step of Adam moves every start as far as it would move a free
weight.
"""

import copy
import math

import pytest
import torch
from torch import nn

import cwy
from cwy.experiments.nmt.cells import Encoder, cell
from cwy.experiments.nmt.recipes import NmtConfig
from cwy.experiments.recurrent import Recurrent
from cwy.experiments.video.model import Predictor
from cwy.parametrizations.reflections import matched_length

RATE = 1e-6


class Layer(nn.Module):
    """A module with one matrix parameter that is far from orthogonal."""

    def __init__(self, *shape, dtype=torch.float64):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(*shape, dtype=dtype))


def step_of(layer, samples=4):
    """How far a step of Adam along a random gradient moves the weight, compared with a free one."""
    squares = []
    for _ in range(samples):
        moved = copy.deepcopy(layer)
        before = moved.weight.detach()
        optimizer = torch.optim.Adam(moved.parameters(), lr=RATE)
        (moved.weight * torch.randn_like(before)).sum().abs().backward()
        optimizer.step()
        squares.append((moved.weight.detach() - before).abs().square().sum().item())
    numbers = before.numel() * (2 if before.is_complex() else 1)
    return math.sqrt(sum(squares) / samples / numbers) / RATE


def norms(layer):
    chain = layer.parametrizations.weight
    v = chain.original if chain.is_tensor else chain.original0
    return v.detach().norm(dim=-2)


SQUARE = [(n, n, reflections) for n in (24, 96) for reflections in (n, n // 4, n // 16)]
TALL = [(96, 60, 60), (96, 24, 24), (96, 6, 6), (96, 1, 1), (24, 96, 24)]


@pytest.mark.parametrize(("rows", "columns", "reflections"), SQUARE + TALL)
@pytest.mark.parametrize(
    "init", ["random", "haar", "identity", "henaff", "helfrich", "a matrix", "assigned"]
)
def test_a_step_moves_the_weight_as_far_as_a_free_one(rows, columns, reflections, init):
    square = rows == columns
    if init in ("henaff", "helfrich") and not square:
        pytest.skip("these are square")
    if init in ("haar", "a matrix", "assigned") and reflections < min(rows, columns):
        pytest.skip("few reflections do not reach it")
    torch.manual_seed(0)
    q = cwy.init.haar(max(rows, columns), min(rows, columns), dtype=torch.float64)
    q = q if rows >= columns else q.mT
    start = {"a matrix": q, "assigned": "random"}.get(init, init)
    options = {"reflections": reflections} if square else {}
    layer = cwy.orthogonal(Layer(rows, columns), init=start, **options)
    if init == "assigned":
        layer.weight = q
    length = norms(layer)
    torch.testing.assert_close(length, length[:1].expand(reflections))
    if square or init == "random":
        expected = matched_length(max(rows, columns), min(rows, columns), reflections)
        torch.testing.assert_close(length[0].item(), expected)
    if reflections == 1 and init == "random" and not square:
        return  # The overlap of one random vector is a matter of luck.
    # The derivation is for random vectors. Those of rotated planes come in pairs.
    tolerance = 0.07 if init == "random" else 0.3
    assert step_of(layer) == pytest.approx(1, abs=tolerance)


@pytest.mark.parametrize("method", ["cwy", "tcwy", "hr"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(32, 32), (3, 32, 32), (3, 32, 16), (16, 32)])
@pytest.mark.parametrize("init", ["random", "haar"])
def test_batches_complex_weights_and_every_method(method, dtype, shape, init):
    if method == "cwy" and shape[-1] != shape[-2]:
        pytest.skip("that is tcwy")
    torch.manual_seed(0)
    layer = cwy.orthogonal(Layer(*shape, dtype=dtype), method=method, init=init)
    assert step_of(layer) == pytest.approx(1, abs=0.12)


@pytest.mark.parametrize("shape", [(8, 8), (8, 5)])
def test_a_number_and_the_old_lengths(shape):
    q = cwy.init.haar(*shape, dtype=torch.float64)
    for start in ("random", "haar", "identity", q):
        layer = cwy.orthogonal(Layer(*shape), init=start, length=3)
        torch.testing.assert_close(norms(layer), torch.full_like(norms(layer), 3))
    trained(layer)
    assert (norms(layer) - 3).abs().min() > 1e-6, "an optimizer may change it"
    layer.weight = q
    torch.testing.assert_close(norms(layer), torch.full_like(norms(layer), 3))
    torch.testing.assert_close(layer.weight.detach(), q)

    raw = cwy.orthogonal(Layer(*shape), init=q, length="raw")
    torch.testing.assert_close(norms(raw), torch.ones_like(norms(raw)))
    torch.manual_seed(1)
    raw = cwy.orthogonal(Layer(*shape), init="random", length="raw")
    torch.manual_seed(1)
    assert torch.equal(
        raw.parametrizations.weight.original, torch.randn(shape, dtype=torch.float64)
    )


def trained(layer):
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        (layer.weight * torch.randn_like(layer.weight)).sum().backward()
        optimizer.step()
    return layer


@pytest.mark.parametrize("init", ["random", "haar"])
def test_a_state_dict_of_the_old_lengths_trains_as_before(init):
    old = cwy.orthogonal(Layer(8, 8), init=init, length="raw")
    new = cwy.orthogonal(Layer(8, 8))
    new.load_state_dict(old.state_dict())
    assert torch.equal(trained(new).weight, trained(old).weight)


def test_recurrent_layers_pass_it_on():
    for length, expected in ((2.5, 2.5), ("raw", 1), (None, matched_length(16, 16, 16))):
        rnn = cwy.nn.OrthogonalRNN(3, 16, init="haar", length=length)
        cell = cwy.nn.OrthogonalRNNCell(3, 16, init="haar", length=length)
        for chain in (rnn.parametrizations["weight_hh_l0"], cell.parametrizations["weight_hh"]):
            assert chain.original.norm(dim=0).tolist() == pytest.approx([expected] * 16)
    for length, expected in ((2.5, 2.5), ("raw", 1)):
        unit = cwy.nn.ConvNERU(3, 4, length=length)
        cell = cwy.nn.ConvNERUCell(3, 4, length=length)
        for chain in (unit.parametrizations["weight_hh_l0"], cell.parametrizations["weight_hh"]):
            assert chain.original.norm(dim=0).tolist() == pytest.approx([expected] * 4)


def test_the_experiments_keep_the_old_lengths():
    """The paper's learning rates and the committed records belong to unit vectors from a matrix."""
    config = NmtConfig(hidden_size=8, init="haar")
    models = [
        Recurrent("cwy", config, 3, 2, last=True, symbols=False, dtype=torch.float64),
        Encoder("cwy", config, 3, torch.float64),
        cell("cwy", config, 3, 3, torch.float64),
        Predictor("tcwy", 4),
    ]
    for model in models:
        vectors = [p for name, p in model.named_parameters() if name.endswith(".original")]
        assert vectors
        for v in vectors:
            torch.testing.assert_close(v.norm(dim=-2), torch.ones_like(v[0]))


@pytest.mark.parametrize("length", [0, -1.0, math.inf, math.nan, True, "unit", [1.0]])
def test_a_bad_length_is_refused(length):
    with pytest.raises(ValueError, match="length must be a positive number, 'matched' or 'raw'"):
        cwy.orthogonal(Layer(4, 4), length=length)
    with pytest.raises(TypeError, match="method 'exprnn' has no option 'length'"):
        cwy.orthogonal(Layer(4, 4), method="exprnn", length=length)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 64), (64, 16)])
def test_nearest_and_every_length_on_a_gpu(shape):
    q = cwy.init.haar(*shape, device="cuda")
    stored = nn.Linear(*shape[::-1], bias=False, device="cuda")
    with torch.no_grad():
        stored.weight.copy_(q.bfloat16())
    layer = cwy.orthogonal(stored)
    assert (layer.weight - q).abs().max() < 5e-3
    assert cwy.orthogonality_error(layer) < 1e-5
    layer.weight = q
    fresh = cwy.orthogonal(nn.Linear(*shape[::-1], bias=False, device="cuda"), init="random")
    for one in (layer, fresh):
        assert norms(one).is_cuda
        torch.testing.assert_close(norms(one), norms(one)[:1].expand(shape[1]))
