"""OrthogonalRNN is torch.nn.RNN with an orthogonal transition."""

import copy
import itertools
import re

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import cwy
from cwy.nn import ModReLU, OrthogonalRNN, OrthogonalRNNCell
from cwy.ops import rollout
from tests.helpers.largest import Largest

SQUARE = [name for name, m in cwy.METHODS.items() if m.kind != "tall"]


def with_orthogonal_transitions(rnn):
    for name, parameter in rnn.named_parameters():
        if "weight_hh" in name:
            nn.init.orthogonal_(parameter)
    return rnn


@pytest.mark.parametrize(
    ("layers", "bidirectional", "batch_first", "layout", "with_h0", "f"),
    list(
        itertools.product(
            (1, 2),
            (False, True),
            (False, True),
            ("padded", "packed", "unsorted", "unbatched"),
            (False, True),
            ("relu", "tanh"),
        )
    ),
)
def test_equals_torch(layers, bidirectional, batch_first, layout, with_h0, f):
    theirs = nn.RNN(3, 5, layers, f, batch_first=batch_first, bidirectional=bidirectional)
    ours = OrthogonalRNN.from_torch(with_orthogonal_transitions(theirs))
    directions = layers * (2 if bidirectional else 1)
    x = (
        torch.randn(7, 3)
        if layout == "unbatched"
        else torch.randn(*((4, 7) if batch_first else (7, 4)), 3)
    )
    h0 = torch.randn(directions, 5) if layout == "unbatched" else torch.randn(directions, 4, 5)
    results = []
    for rnn in (ours, theirs):
        leaf, start = x.clone().requires_grad_(), h0.clone().requires_grad_()
        given = leaf
        if layout in ("packed", "unsorted"):
            lengths = torch.tensor([7, 5, 5, 2] if layout == "packed" else [3, 7, 1, 5])
            given = pack_padded_sequence(
                leaf, lengths, batch_first, enforce_sorted=layout == "packed"
            )
        y, hn = rnn(given, start if with_h0 else None)
        if isinstance(y, PackedSequence):
            y, _ = pad_packed_sequence(y, batch_first)
        (
            (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum() + hn.square().sum()
        ).backward()
        weights = [
            p.grad for n, p in rnn.named_parameters() if n.startswith(("weight_ih", "bias_ih"))
        ]
        results.append([y, hn, leaf.grad, *([start.grad] if with_h0 else []), *weights])
    for a, b in zip(*results, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= 1e-5 * max(1, b.abs().max())


def test_the_gradient_of_the_transition_is_torchs():
    theirs = with_orthogonal_transitions(nn.RNN(3, 5, dtype=torch.float64))
    ours = OrthogonalRNN.from_torch(theirs)
    x = torch.randn(9, 4, 3, dtype=torch.float64)
    theirs(x)[0].square().sum().backward()
    ours(x)[0].square().sum().backward()
    chart, v = ours.parametrizations.weight_hh_l0[0], ours.parametrizations.weight_hh_l0.original
    (expected,) = torch.autograd.grad(chart(v), v, theirs.weight_hh_l0.grad)
    torch.testing.assert_close(v.grad, expected)


def is_complex(method):
    return not cwy.METHODS[method].real


@pytest.mark.parametrize("method", SQUARE)
def test_every_method(method):
    rnn = OrthogonalRNN(3, 6, nonlinearity="modrelu", method=method)
    x = torch.randn(9, 4, 3)
    y, hn = rnn(x)
    assert y.dtype == (torch.complex64 if is_complex(method) else torch.float32)
    mapped = nn.functional.linear(x.to(y.dtype), rnn.weight_ih_l0)
    h0 = torch.zeros(4, 6, dtype=y.dtype)
    expected, last = rollout(mapped, h0, rnn.weight_hh_l0, rnn.bias_ih_l0, backend="reference")
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(hn[0], last, atol=1e-5, rtol=1e-5)
    y.abs().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in rnn.parameters())
    assert cwy.orthogonality_error(rnn.weight_hh_l0) <= 1e-5


@pytest.mark.parametrize(
    "f", ["modrelu", "abs", "relu", "leaky_relu", "tanh", "identity", torch.tanh]
)
def test_few_reflections_never_form_q(f):
    rnn = OrthogonalRNN(3, 40, nonlinearity=f, reflections=2, dtype=torch.float64)
    rnn.weight_hh_l0 = cwy.ops.cwy_matrix(torch.randn(40, 2, dtype=torch.float64))
    x = torch.randn(9, 4, 3, dtype=torch.float64)
    formed = copy.deepcopy(rnn)
    cwy.bake(formed)
    torch.testing.assert_close(rnn(x)[0], formed(x)[0])
    with Largest(lambda t: t.shape[-2:] == (40, 40)) as seen:
        rnn(x)[0].sum().backward()
    assert seen.largest == 0


@pytest.mark.parametrize("memory", ["store", "checkpoint", "reversible"])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_memory_modes_and_last_output(memory, bidirectional):
    torch.manual_seed(1)
    rnn = OrthogonalRNN(
        3, 6, 2, "abs", bidirectional=bidirectional, memory=memory, dtype=torch.float64
    )
    stored = copy.deepcopy(rnn)
    stored.memory = "store"
    x = torch.randn(150, 4, 3, dtype=torch.float64)
    for output in ("all", "last"):
        results = []
        for one in (rnn, stored):
            one.output = output
            one.zero_grad()
            y, hn = one(x)
            (y.square().sum() + hn.sum()).backward()
            results.append([y, hn, *(p.grad for p in one.parameters())])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-7)
        assert y.shape == (
            (4, 6 * (1 + bidirectional)) if output == "last" else (150, 4, 6 * (1 + bidirectional))
        )


@pytest.mark.parametrize("f", ["tanh", "abs", "identity", torch.sin])
def test_output_written_to_in_place_is_never_a_wrong_gradient(f):
    """Only stored states are read again, and then torch says so; all else may be written to."""
    x = torch.randn(150, 4, 3, dtype=torch.float64)
    for memory, output in itertools.product(("store", "checkpoint", "reversible"), ("all", "last")):
        if memory != "store" and (callable(f) or (memory == "reversible" and f == "tanh")):
            continue
        rnn = OrthogonalRNN(3, 6, nonlinearity=f, memory=memory, output=output, dtype=torch.float64)
        (2 * rnn(x)[0]).square().sum().backward()
        expected = [p.grad for p in rnn.parameters()]
        rnn.zero_grad()
        loss = rnn(x)[0].mul_(2).square().sum()
        if memory == "store" and output == "all" and isinstance(f, str):
            with pytest.raises(
                RuntimeError, match=r"was modified by an inplace operation\. Write y = 2 \* y"
            ):
                loss.backward()
            continue
        loss.backward()
        for p, grad in zip(rnn.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, grad)


def test_last_output_is_the_last_of_all():
    lengths = torch.tensor([3, 7, 1, 5])
    rnn = OrthogonalRNN(3, 6)
    x = torch.randn(7, 4, 3)
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    states, _ = pad_packed_sequence(rnn(packed)[0])
    unbatched, _ = rnn(x[:, 0])
    rnn.output = "last"
    torch.testing.assert_close(rnn(packed)[0], states[lengths - 1, torch.arange(4)])
    torch.testing.assert_close(rnn(x[:, 0])[0], unbatched[-1])


def test_packed_equals_padded_and_masked():
    rnn, x, lengths = OrthogonalRNN(3, 6, 2, bidirectional=True), torch.randn(7, 4, 3), [7, 4, 3, 1]
    states, _ = pad_packed_sequence(rnn(pack_padded_sequence(x, lengths))[0])
    for b, n in enumerate(lengths):
        torch.testing.assert_close(states[:n, b], rnn(x[:n, b])[0])
        assert (states[n:, b] == 0).all()


@pytest.mark.parametrize("f", ["modrelu", "tanh", torch.sin])
def test_the_cell_is_one_step(f):
    for method in SQUARE:
        if is_complex(method) and f == "tanh":
            with pytest.raises(ValueError, match="no complex form"):
                OrthogonalRNNCell(3, 6, nonlinearity=f, method=method)
            continue
        cell = OrthogonalRNNCell(3, 6, nonlinearity=f, method=method)
        rnn = OrthogonalRNN(3, 6, nonlinearity=f, method=method)
        rnn.load_state_dict(
            {
                re.sub(r"(weight_ih|weight_hh|bias_ih)", r"\1_l0", k): v
                for k, v in cell.state_dict().items()
            }
        )
        x, h = torch.randn(4, 3), torch.randn(4, 6)
        torch.testing.assert_close(
            cell(x, h), rnn(x[None], h[None].to(rnn.weight_hh_l0.dtype))[0][0], atol=1e-6, rtol=1e-5
        )
        torch.testing.assert_close(cell(x[0]), cell(x)[0])


def test_dropout_is_between_layers_and_only_in_training():
    rnn, x = OrthogonalRNN(3, 6, 2, dropout=0.5), torch.randn(5, 4, 3)
    assert not torch.equal(rnn(x)[0], rnn(x)[0])
    rnn.eval()
    assert torch.equal(rnn(x)[0], rnn(x)[0])


@pytest.mark.parametrize("reflections", [None, 2])
@pytest.mark.parametrize("f", ["identity", lambda z: z])
def test_autocast_keeps_the_recurrence_in_full_precision(reflections, f):
    """By Q or by factors, which few steps or few reflections make cheaper."""
    rnn, h0 = (
        OrthogonalRNN(3, 32, nonlinearity=f, bias=False, reflections=reflections),
        torch.randn(1, 2, 32),
    )
    for steps, dtype in itertools.product((4, 300), (torch.float32, torch.bfloat16)):
        with torch.autocast("cpu", torch.bfloat16):
            _, hn = rnn(torch.zeros(steps, 2, 3, dtype=dtype), h0)
        assert hn.dtype == torch.float32
        torch.testing.assert_close(hn.norm(dim=-1), h0.norm(dim=-1), rtol=1e-4, atol=0)
        hn.sum().backward()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match=r"torch\.float64"),
    ):
        rnn(torch.zeros(4, 2, 3).double(), h0)


def test_compile_and_export_compute_the_transition_once():
    like = {"dtype": torch.float64}
    rnn, x = OrthogonalRNN(3, 6, 2, "modrelu", **like), torch.randn(5, 4, 3, **like)
    twin = copy.deepcopy(rnn)
    torch.compiler.reset()
    torch.compile(lambda x: rnn(x)[0].square().sum(), fullgraph=True, backend="aot_eager")(
        x
    ).backward()
    twin(x)[0].square().sum().backward()
    for a, b in zip(rnn.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    program = torch.export.export(rnn.eval(), (x,))
    torch.testing.assert_close(program.module()(x)[0], rnn(x)[0])
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("cwy.cwy_matrix.default") == 2
    assert targets.count("cwy.rollout.default") == 2


def test_from_torch_refuses_a_free_transition():
    with pytest.raises(ValueError, match="n=5"):
        OrthogonalRNN.from_torch(nn.RNN(3, 5))


ERRORS = [
    (lambda: OrthogonalRNN(3, 0), "hidden_size must be at least 1, got 0"),
    (lambda: OrthogonalRNN(3, 5, 0), "num_layers must be at least 1"),
    (lambda: OrthogonalRNN(3, 5, dropout=2.0), "dropout must be a probability"),
    (
        lambda: OrthogonalRNN(3, 5, nonlinearity="gelu"),
        "OrthogonalRNN: unknown nonlinearity 'gelu'",
    ),
    (lambda: OrthogonalRNN(3, 5, memory="reversible"), "OrthogonalRNN: memory='reversible'.*tanh"),
    (lambda: OrthogonalRNN(3, 5, method="cvy"), "Did you mean 'cwy'"),
    (lambda: OrthogonalRNN(3, 5, reflections=9), "between 1 and 5"),
    (lambda: OrthogonalRNN(3, 5, backend="foo"), "'auto', 'cuda'.*got 'foo'"),
    (lambda: OrthogonalRNN(3, 5, method="eurnn"), "'tanh' has no complex form.*'modrelu'"),
    (
        lambda: OrthogonalRNN(3, 5)(torch.zeros(2, 2, 3), torch.zeros(1, 2, 5) * 1j),
        "hx is torch.complex64",
    ),
    (lambda: OrthogonalRNN(3, 5)(torch.zeros(2, 2, 2, 3)), "2 .unbatched. or 3 dimensions"),
    (lambda: OrthogonalRNN(3, 5)(torch.zeros(2, 2, 4)), "3 features"),
    (
        lambda: OrthogonalRNN(3, 5)(torch.zeros(2, 2, 3), torch.zeros(1, 3, 5)),
        r"hx of shape \(1, 2, 5\)",
    ),
    (
        lambda: OrthogonalRNN(3, 5, batch_first=True)(torch.zeros(2, 0, 3)),
        r"at least one step, got input of shape \(2, 0, 3\)",
    ),
    (
        lambda: OrthogonalRNN(3, 5)(torch.zeros(2, 2, 3).double()),
        r"^OrthogonalRNN: the input is torch.float64.*\.to\(torch.float32",
    ),
    (
        lambda: OrthogonalRNN(3, 5, memory="checkpoint")(torch.zeros(2, 2, 3).bfloat16()),
        "input is torch.bfloat16",
    ),
    (
        lambda: OrthogonalRNNCell(3, 5)(torch.zeros(2, 3).long()),
        "^OrthogonalRNNCell: the input is torch.int64",
    ),
    (
        lambda: OrthogonalRNNCell(3, 5)(torch.zeros(2, 3), torch.zeros(2, 5) * 1j),
        "hx is torch.complex64",
    ),
    (lambda: OrthogonalRNNCell(3, 5)(torch.zeros(2, 4)), r"input \(\*, 3\)"),
]


@pytest.mark.parametrize(("call", "words"), ERRORS)
def test_errors(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_modrelu_module():
    act = ModReLU(4)
    with torch.no_grad():
        act.bias.copy_(torch.tensor([-0.5, 0.5, 0.0, -3.0]))
    torch.testing.assert_close(
        act(torch.tensor([-1.0, 2.0, 3.0, 2.0])), torch.tensor([-0.5, 2.5, 3.0, 0.0])
    )
    z = torch.tensor([3 + 4j, 0j, 1j, 1 + 0j])
    torch.testing.assert_close(act(z), torch.tensor([2.7 + 3.6j, 0j, 1j, 0j]))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("memory", ["store", "reversible"])
def test_half_precision_stays_and_keeps_the_norm(half, memory):
    layer = OrthogonalRNN(5, 64, 2, nonlinearity="identity", bias=False, memory=memory).to(half)
    for steps in (6, 30):
        output, h = layer(torch.randn(steps, 3, 5).to(half))
        assert output.dtype == h.dtype == half
    first = torch.randn(2, 3, 64).to(half)
    _, last = layer(torch.zeros(1000, 3, 5).to(half), first)
    torch.testing.assert_close(
        last[0].float().norm(dim=-1), first[0].float().norm(dim=-1), rtol=0.02, atol=0
    )


def test_a_function_is_differentiated_by_autograd_which_stores():
    with pytest.raises(ValueError, match=r"supports only memory='store'.*memory='checkpoint'"):
        OrthogonalRNN(5, 8, nonlinearity=torch.sin, memory="checkpoint")
    layer = OrthogonalRNN(5, 8, nonlinearity="abs", memory="checkpoint")
    with pytest.raises(
        ValueError,
        match=r"no backend of rollout can serve this \(.*reference: autograd stores every state",
    ):
        torch.func.grad(lambda x: layer(x)[0].sum())(torch.randn(4, 2, 5))


def test_complex_modrelu_is_one_graph():
    layer, x = OrthogonalRNN(5, 8, method="urnn", nonlinearity="modrelu"), torch.randn(4, 2, 5)
    torch.testing.assert_close(
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x)[0], layer(x)[0]
    )


def test_from_a_parametrized_network_at_rest():
    theirs = nn.utils.parametrizations.orthogonal(nn.RNN(4, 6, 2, dropout=0.5), "weight_hh_l0")
    theirs = nn.utils.parametrizations.orthogonal(theirs, "weight_hh_l1").eval()
    x = torch.randn(5, 2, 4)
    torch.testing.assert_close(OrthogonalRNN.from_torch(theirs)(x)[0], theirs(x)[0])
