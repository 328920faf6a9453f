"""Layers leave the library: baked, they export as plain torch; their states, settings and weights
go back and forth.
"""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import cwy
from cwy.nn import ConvLSTM, ConvLSTMCell, ConvNERU, ConvNERUCell, OrthogonalRNN, OrthogonalRNNCell

LAYERS = {
    "rnn": lambda **more: OrthogonalRNN(3, 5, 2, "relu", bidirectional=True, **more),
    "few reflections": lambda **more: OrthogonalRNN(
        3, 5, reflections=2, nonlinearity="abs", memory="reversible", **more
    ),
    "unitary": lambda **more: OrthogonalRNN(3, 5, method="urnn", nonlinearity="modrelu", **more),
    "on the manifold": lambda **more: OrthogonalRNN(3, 5, method="rgd", **more),
    "cell": lambda **more: OrthogonalRNNCell(3, 5, method="exprnn", **more),
    "conv": lambda **more: ConvNERU(3, 4, num_layers=2, **more),
    "conv cell": lambda **more: ConvNERUCell(3, 4, method="own", **more),
    "glorot": lambda **more: ConvNERU(3, 4, method="glorot", **more),
    "lstm": lambda **more: ConvLSTM(3, 4, **more),
    "lstm cell": lambda **more: ConvLSTMCell(3, 4, normalize=False, **more),
}
every_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)

LEAVING = {
    "reversible, only the last": (
        lambda: OrthogonalRNN(
            3, 5, nonlinearity="abs", memory="reversible", output="last", batch_first=True
        ),
        (4, 7, 3),
        (2, 11, 3),
    ),
    "bidirectional modrelu": (
        lambda: OrthogonalRNN(3, 5, 1, "modrelu", bidirectional=True),
        (7, 4, 3),
        (11, 2, 3),
    ),
    "images": (lambda: ConvNERU(3, 4, memory="checkpoint"), (7, 4, 3, 6, 5), (11, 2, 3, 6, 5)),
}
leaving = pytest.mark.parametrize(("make", "shape", "other"), LEAVING.values(), ids=LEAVING)

LOADER = """
import sys, torch
sys.modules["cwy"] = None
x, expected = torch.load(sys.argv[2])
torch.testing.assert_close(torch.export.load(sys.argv[1]).module()(x), expected)
"""


def exported(layer, x, **more):
    sizes = {0: torch.export.Dim("first", min=1), 1: torch.export.Dim("second", min=1)}
    return torch.export.export(layer, (x,), dynamic_shapes=(sizes,), **more)


@pytest.mark.slow
@leaving
def test_a_baked_layer_exports_as_plain_torch_of_any_length_and_batch(make, shape, other, tmp_path):
    layer = cwy.bake(make()).eval()
    program = exported(layer, torch.randn(shape))
    assert not any(
        "cwy" in str(node.target) for graph in _graphs(program.graph_module) for node in graph.nodes
    )
    x = torch.randn(other)
    torch.testing.assert_close(program.module()(x), layer(x))
    torch.export.save(program, tmp_path / "layer.pt2")
    torch.save((x, layer(x)), tmp_path / "expected.pt")
    subprocess.run(
        [sys.executable, "-c", LOADER, tmp_path / "layer.pt2", tmp_path / "expected.pt"], check=True
    )


def _graphs(module):
    return [part.graph for part in module.modules() if isinstance(part, torch.fx.GraphModule)]


@pytest.mark.slow
@leaving
def test_a_baked_layer_is_an_onnx_model_of_any_length_and_batch(make, shape, other, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    layer = cwy.bake(make()).eval()
    sizes = {0: torch.export.Dim("first", min=1), 1: torch.export.Dim("second", min=1)}
    model = torch.onnx.export(
        layer, (torch.randn(shape),), dynamo=True, dynamic_shapes=(sizes,), verbose=False
    )
    model.save(tmp_path / "layer.onnx")
    session = runtime.InferenceSession(tmp_path / "layer.onnx")
    x = torch.randn(other)
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    for ours, theirs in zip(layer(x), found, strict=True):
        torch.testing.assert_close(torch.tensor(theirs), ours.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="the Inductor of torch 2.11 refuses scan")
def test_a_baked_layer_is_compiled_ahead_of_time_for_any_length_and_batch(tmp_path):
    layer = cwy.bake(OrthogonalRNN(3, 5, nonlinearity="abs")).eval()
    program = exported(layer, torch.randn(7, 4, 3))
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "layer.pt2")
    )
    x = torch.randn(11, 2, 3)
    torch.testing.assert_close(torch._inductor.aoti_load_package(package)(x), layer(x))


@pytest.mark.parametrize("make", [LAYERS["few reflections"], LAYERS["conv"]])
def test_a_constrained_layer_exports_with_any_length_and_batch(make):
    layer = make().eval()
    conv = isinstance(layer, ConvNERU)
    x, other = (torch.randn(*sizes, 3, *((6, 5) if conv else ())) for sizes in ((7, 4), (11, 2)))
    program = exported(layer, x)
    assert any("cwy.rollout" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(other), layer(other))


@pytest.mark.parametrize(("memory", "dynamic"), [("checkpoint", None), ("reversible", True)])
def test_a_new_length_compiles_nothing_anew(memory, dynamic):
    """The second length may, when torch notices that lengths change."""
    torch.compiler.reset()
    layer = OrthogonalRNN(3, 6, nonlinearity="abs", memory=memory, dtype=torch.float64)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(
        lambda x: layer(x)[0].square().sum(), fullgraph=True, backend=counter, dynamic=dynamic
    )
    seen = []
    for steps in (5, 6, 67):
        x = torch.randn(steps, 4, 3, dtype=torch.float64)
        found = torch.autograd.grad(step(x), [*layer.parameters()])
        expected = torch.autograd.grad(layer(x)[0].square().sum(), [*layer.parameters()])
        torch.testing.assert_close(found, expected)
        seen.append(counter.frame_count)
    assert seen[2] == seen[1]


@every_layer
def test_states_go_from_a_constrained_layer_to_a_baked_one_and_back(make):
    first, second, baked = make(), make(), cwy.bake(make())
    expected = cwy.bake(copy.deepcopy(first)).state_dict()
    before = torch.get_rng_state()
    baked.load_state_dict(first.state_dict())
    torch.testing.assert_close(baked.state_dict(), expected)
    if "urnn" not in repr(first):
        second.load_state_dict(baked.state_dict())
        torch.testing.assert_close(cwy.bake(second).state_dict(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_constrained_weight_takes_a_plain_one_that_is_orthogonal():
    plain, model = nn.Linear(4, 4), nn.Sequential(cwy.orthogonal(nn.Linear(4, 4)))
    state = {f"0.{name}": value for name, value in plain.state_dict().items()}
    before = copy.deepcopy(model.state_dict())
    with (
        pytest.warns(UserWarning, match=r"0\.weight is not loaded"),
        pytest.raises(RuntimeError),
    ):
        model.load_state_dict(state)
    torch.testing.assert_close(
        model.state_dict()["0.parametrizations.weight.original"],
        before["0.parametrizations.weight.original"],
    )
    with pytest.warns(UserWarning, match=r"0\.weight"):
        assert model.load_state_dict(state, strict=False).unexpected_keys == ["0.weight"]
    nn.init.orthogonal_(plain.weight)
    model.load_state_dict(state)
    torch.testing.assert_close(model[0].weight, plain.weight)
    assert not cwy.bake(model)[0]._load_state_dict_pre_hooks


@every_layer
def test_reset_parameters_draws_as_the_constructor_does(make):
    """Also where nothing is known: FSDP calls it after ``to_empty``."""
    torch.manual_seed(4)
    expected = make().state_dict()
    for layer in (make(), make(device="meta").to_empty(device="cpu")):
        torch.manual_seed(4)
        layer.reset_parameters()
        torch.testing.assert_close(layer.state_dict(), expected, rtol=0, atol=0)
    torch.manual_seed(4)
    baked = cwy.bake(make())
    torch.manual_seed(4)
    layer.reset_parameters()
    torch.testing.assert_close(cwy.bake(layer).state_dict(), baked.state_dict())


@every_layer
def test_repr_shows_what_differs_from_the_defaults(make):
    layer = make(dtype=torch.complex128 if "urnn" in repr(make()) else torch.float64)
    shown = layer.extra_repr()
    again = eval(f"{layer._maker().__name__}({shown})")
    assert again.extra_repr() == shown
    for name, argument in layer._arguments().items():
        assert (f"{name}=" in shown) == (
            argument.default is not argument.empty and layer._setting(name) != argument.default
        )


@pytest.mark.parametrize("f", ["tanh", "relu"])
@pytest.mark.parametrize("baked", [False, True])
def test_to_torch_is_torchs_network(f, baked):
    layer, x = (
        OrthogonalRNN(3, 5, 2, f, bidirectional=True, batch_first=True, dropout=0.5).eval(),
        torch.randn(4, 7, 3),
    )
    cell = OrthogonalRNNCell(3, 5, nonlinearity=f, bias=False)
    if baked:
        cwy.bake(layer)
        cwy.bake(cell)
    theirs = layer.to_torch()
    assert type(theirs) is nn.RNN
    torch.testing.assert_close(theirs(x), layer(x))
    torch.testing.assert_close(OrthogonalRNN.from_torch(theirs).eval()(x), layer(x))
    torch.testing.assert_close(cell.to_torch()(x[0]), cell(x[0]))
    weights = [weight for direction in layer.all_weights for weight in direction]
    torch.testing.assert_close(
        weights, [w for direction in theirs.all_weights for w in direction[:3]]
    )
    with pytest.raises(ValueError, match=r"to_torch.*nonlinearity='abs'"):
        OrthogonalRNN(3, 5, nonlinearity="abs").to_torch()


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_first": "False"},
        {"bias": "True"},
        {"num_layers": True},
        {"dropout": True},
        {"bidirectional": 1},
    ],
)
def test_what_torch_refuses_is_refused(wrong):
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        OrthogonalRNN(3, 5, **wrong)
    for kind in (ConvNERU, ConvLSTM):
        if next(iter(wrong)) in ("batch_first", "num_layers"):
            with pytest.raises(TypeError, match=next(iter(wrong))):
                kind(3, 5, **wrong)


@every_layer
def test_a_float64_input_and_no_steps_are_refused_in_our_words(make):
    layer = make()
    images = isinstance(layer, ConvNERU | ConvNERUCell | ConvLSTM | ConvLSTMCell)
    cell = isinstance(layer, OrthogonalRNNCell | ConvNERUCell | ConvLSTMCell)
    shape = (*(() if cell else (2,)), 2, 3, *((6, 5) if images else ()))
    if not next(layer.parameters()).is_complex():
        with pytest.raises(ValueError, match=r"the input is torch\.float64.*Convert the input"):
            layer(torch.zeros(shape, dtype=torch.float64))
    if not cell:
        with pytest.raises(ValueError, match="at least one step"):
            layer(torch.zeros(0, *shape[1:]))


def test_a_cells_first_state_takes_the_dtype_of_the_cell():
    cell, x, h = ConvNERUCell(3, 4), torch.randn(2, 3, 6, 5), torch.randn(2, 4, 6, 5)
    torch.testing.assert_close(cell(x, h.double()), cell(x, h))
