"""ConvNERU and ConvLSTM: equal to plain loops of conv2d, bounded as Appendix B says, and helpful
about mistakes.
"""

import copy
import re

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch.nn.functional import conv2d, instance_norm

import cwy
from cwy.nn import ConvLSTM, ConvLSTMCell, ConvNERU, ConvNERUCell
from cwy.nn.conv import FREE
from cwy.ops import conv_rollout
from cwy.ops.recurrence.convolved import Convolved
from cwy.ops.recurrence.steps import TORCH

TALL = [name for name, m in cwy.METHODS.items() if m.kind != "square" and m.real]
F64 = torch.float64
LAYOUTS = [torch.contiguous_format, torch.channels_last]
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=["channels first", "channels last"])


def plain(x, h, w, k, b, f, lengths):
    """The paper's equation, one sequence, one step and one convolution at a time: outputs (T, B, C,
    H, W) and last states.
    """
    outputs, last = torch.zeros(*x.shape[:2], *h.shape[1:], dtype=x.dtype), []
    for i, length in enumerate(lengths):
        g = h[i : i + 1]
        for t in range(length):
            g = f(
                conv2d(g, k, padding=k.shape[-1] // 2)
                + b.view(-1, 1, 1)
                + conv2d(x[t, i : i + 1], w, padding=w.shape[-1] // 2)
            )
            outputs = outputs.index_put((torch.tensor(t), torch.tensor(i)), g[0])
        last.append(g)
    return outputs, torch.cat(last)


@pytest.mark.parametrize("memory", ["store", "checkpoint"])
@pytest.mark.parametrize(("q", "f"), [(1, "tanh"), (3, "relu"), (5, "abs")])
@pytest.mark.parametrize("lengths", [None, [7, 2, 5]])
@layouts
def test_equals_a_plain_loop_of_convolutions(memory, q, f, lengths, layout):
    unit = ConvNERU(2, 4, q, 2, f, dtype=F64, method="glorot", memory=memory, batch_first=True).to(
        memory_format=layout
    )
    x, h = torch.randn(3, 7, 2, 6, 5, dtype=F64), torch.randn(2, 3, 4, 6, 5, dtype=F64)
    if lengths:
        x[1, 2:] = torch.nan
    results = []
    for ours in (True, False):
        unit.zero_grad()
        leaf, start = x.clone().requires_grad_(), h.clone().requires_grad_()
        if ours:
            y, hn = unit(leaf, start, None if lengths is None else torch.tensor(lengths))
        else:
            y, last = leaf.transpose(0, 1), []
            for layer in range(2):
                w, b = getattr(unit, f"weight_ih_l{layer}"), getattr(unit, f"bias_ih_l{layer}")
                y, end = plain(
                    y, start[layer], w, unit.kernel(layer), b, getattr(torch, f), lengths or [7] * 3
                )
                last.append(end)
            y, hn = y.transpose(0, 1), torch.stack(last)
        (
            (y * torch.linspace(-1, 1, y.numel(), dtype=F64).view(y.shape)).sum()
            + hn.square().sum()
        ).backward()
        results.append(
            [y, hn, leaf.grad.nan_to_num(0), start.grad, *(p.grad for p in unit.parameters())]
        )
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("memory", ["store", "checkpoint"])
@pytest.mark.parametrize("lengths", [None, torch.tensor([3, 1])])
@pytest.mark.parametrize("batch_first", [False, True])
def test_states_lie_in_memory_as_the_images_or_the_weights_do(memory, lengths, batch_first):
    unit, x = ConvNERU(2, 4, memory=memory, batch_first=batch_first), torch.randn(3, 2, 2, 6, 5)
    last = x.flatten(0, 1).contiguous(memory_format=torch.channels_last).unflatten(0, (3, 2))
    weights = copy.deepcopy(unit).to(memory_format=torch.channels_last)
    for images, layout, layer in (
        (x, LAYOUTS[0], unit),
        (last, LAYOUTS[1], unit),
        (x, LAYOUTS[1], weights),
    ):
        y, hn = layer(images.transpose(0, 1) if batch_first else images, lengths=lengths)
        assert all(
            image[None].is_contiguous(memory_format=layout) for images in y for image in images
        )
        assert lengths is not None or hn[0].is_contiguous(memory_format=layout)


@layouts
@pytest.mark.parametrize("q", [1, 3, 5])
def test_a_kernel_turned_round_is_its_adjoint(layout, q):
    kernel = Convolved(torch.randn(4, 4, q, q, dtype=F64).contiguous(memory_format=layout))
    x, h = torch.randn(2, 2, 4, 6, 5, dtype=F64).contiguous()
    results = {}
    for name, way in {
        "step": kernel.step,
        "back": kernel.back,
        "tb": kernel.turned().back,
        "ts": kernel.turned().step,
    }.items():
        way(x, h, results.setdefault(name, torch.empty_like(x)))
    torch.testing.assert_close(results["tb"], results["step"], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(results["ts"], results["back"], rtol=1e-12, atol=1e-12)


@layouts
@pytest.mark.parametrize("memory", ["store", "checkpoint"])
@pytest.mark.parametrize("f", ["relu", "abs"])
def test_the_op_is_well_registered(layout, memory, f):
    sizes = (8, 2, 6, 5), (2, 3, 6, 5), (3, 3, 3, 3), (3, 2, 3, 3)
    x, h0, kernel, weight = (
        torch.randn(size).contiguous(memory_format=layout).requires_grad_() for size in sizes
    )
    options = {
        "nonlinearity": f,
        "sizes": [2] * 4,
        "memory": memory,
        "last": False,
        "loops": TORCH.name,
    }
    tensors = (x, h0, [kernel], None, weight)
    torch.library.opcheck(torch.ops.cwy.rollout.default, tensors, options)


def test_compiled_images_may_lie_otherwise_than_the_weights():
    unit = ConvNERU(2, 4, memory="checkpoint")
    x = torch.randn(4, 3, 6, 5, 2).movedim(-1, 2)
    torch.compiler.reset()
    found = torch.autograd.grad(
        torch.compile(lambda x: unit(x)[0].sum(), fullgraph=True)(x), unit.weight_ih_l0
    )
    torch.testing.assert_close(
        found, torch.autograd.grad(unit(x)[0].sum(), unit.weight_ih_l0), atol=1e-4, rtol=1e-4
    )


def test_a_batch_whose_size_the_data_decide_can_be_exported():
    class Chosen(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.unit = ConvNERU(2, 3)

        def forward(self, x, keep):
            return self.unit(x[:, keep.nonzero().squeeze(1)])[0]

    module, x, keep = Chosen().eval(), torch.randn(4, 3, 2, 6, 6), torch.tensor([True, False, True])
    torch.testing.assert_close(
        torch.export.export(module, (x, keep)).module()(x, keep), module(x, keep)
    )


@pytest.mark.parametrize("name", ["bias_ih_l0", "weight_ih_l0"])
def test_a_tangent_of_one_parameter(name):
    unit, x = (
        ConvNERU(2, 3, nonlinearity="modrelu", memory="store", dtype=F64),
        torch.randn(4, 2, 2, 6, 6, dtype=F64),
    )
    value = getattr(unit, name).detach()
    tangent = torch.randn_like(value)
    call = lambda value: torch.func.functional_call(unit, {name: value}, x)[0]
    with fwAD.dual_level():
        found = fwAD.unpack_dual(call(fwAD.make_dual(value, tangent))).tangent
    torch.testing.assert_close(found, torch.func.jvp(call, (value,), (tangent,))[1])


def test_derivatives_of_every_kind():
    x, h, k = (
        torch.randn(3, 2, 2, 3, 4, dtype=F64),
        torch.randn(2, 2, 3, 4, dtype=F64),
        torch.randn(2, 2, 3, 3, dtype=F64),
    )
    b, w = torch.randn(2, dtype=F64), torch.randn(2, 2, 3, 3, dtype=F64)
    given = [t.requires_grad_() for t in (x, h, k, b, w)]
    call = lambda x, h, k, b, w, **more: conv_rollout(x, h, k, b, "tanh", weight=w, **more)
    assert torch.autograd.gradcheck(call, given)
    assert torch.autograd.gradgradcheck(call, given)
    expected = call(*given, backend="reference")
    _, tangent = torch.func.jvp(lambda k: call(x, h, k, b, w)[0].sum(), (k,), (torch.ones_like(k),))
    (gradient,) = torch.autograd.grad(expected[0].sum(), k)
    torch.testing.assert_close(tangent, gradient.sum())
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(*given)
    torch.testing.assert_close(compiled, expected)
    last = call(*given, memory="checkpoint", output="last")
    assert last[0] is None
    torch.testing.assert_close(last[1], expected[1])


@pytest.mark.parametrize("method", [*TALL, *FREE])
def test_every_method_trains_and_keeps_its_constraint(method):
    unit = ConvNERU(3, 4, method=method)
    optimizer = cwy.optim.for_model(unit, lr=1e-2, orthogonal_lr=0.1)
    x, first = torch.randn(6, 2, 3, 8, 8), None
    for _ in range(5):
        optimizer.zero_grad()
        loss = (unit(x)[0] - 1).square().mean()
        loss.backward()
        optimizer.step()
        first = loss.item() if first is None else first
    assert loss < first
    assert len(unit.state_dict()) >= 2
    if method == "zeros":
        assert not unit.kernel(0).any()
        torch.testing.assert_close(unit(x)[0][3], unit(x[3:4])[0][0])
    if method in TALL or method == "orth-init":
        fresh = unit if method in TALL else ConvNERU(3, 4, method=method)
        assert cwy.orthogonality_error(3 * fresh.kernel(0).flatten(1)) < 1e-5
    assert cwy.bake(copy.deepcopy(unit))(x)[0].sub(unit(x)[0]).abs().max() < 1e-6


@pytest.mark.parametrize("method", ["tcwy", "rgd-c-c", "own"])
def test_states_and_gradients_are_bounded_as_appendix_b_says(method):
    # The kernels that preserve the most: equal taps, so that smooth images keep their norm; and
    # those of a random start.
    tap = cwy.init.haar(6, dtype=F64)
    smooth = (tap[:, :, None, None] / 3).expand(6, 6, 3, 3).flatten(1)
    for transition in (None, smooth):
        if transition is not None and method == "own":
            continue  # its rows have zero mean
        unit = ConvNERU(
            1, 6, nonlinearity="identity", bias=False, dtype=F64, method=method, init=transition
        )
        for f in ("identity", "relu", "tanh", "abs"):
            unit.nonlinearity = f
            h = torch.ones(1, 1, 6, 16, 16, dtype=F64, requires_grad=True)
            states, _ = unit(torch.zeros(200, 1, 1, 16, 16, dtype=F64), h)
            norms = torch.cat([h.norm().view(1), states.flatten(1).norm(dim=1)])
            assert (norms.diff() <= 1e-12 * norms[:-1]).all()
            (gradient,) = torch.autograd.grad(states[-1], h, torch.ones_like(states[-1]))
            assert gradient.norm() <= (1 + 1e-12) * torch.ones_like(h).norm()
    if method == "tcwy":
        zeros = torch.zeros(200, 1, 6, 16, 16, dtype=F64)
        kept, _ = conv_rollout(zeros, h[0], unit.kernel(0), nonlinearity="identity")
        grown, _ = conv_rollout(zeros, h[0], 1.5 * unit.kernel(0), nonlinearity="identity")
        assert kept[-1].norm() > 1e-3 * h.norm(), "it remembers, too"
        assert grown[-1].norm() > 1e30 * h.norm()


@pytest.mark.parametrize("normalize", [True, False])
def test_convlstm_is_its_equations(normalize):
    lstm = ConvLSTM(2, 3, dtype=F64, normalize=normalize)
    x, lengths = torch.randn(5, 2, 2, 4, 4, dtype=F64), torch.tensor([3, 5])
    y, (h, c) = lstm(x, lengths=lengths)
    for i, length in enumerate(lengths):
        hi = ci = torch.zeros(1, 3, 4, 4, dtype=F64)
        for t in range(length):
            z = conv2d(
                torch.cat([x[t, i : i + 1], hi], 1),
                torch.cat([lstm.weight_ih_l0, lstm.weight_hh_l0], 1),
                padding=1,
            )
            z = (
                instance_norm(z, weight=lstm.scale_l0, bias=lstm.bias_ih_l0)
                if normalize
                else z + lstm.bias_ih_l0.view(-1, 1, 1)
            )
            a, f, g, o = z.split(3, 1)
            ci = f.sigmoid() * ci + a.sigmoid() * g.tanh()
            hi = o.sigmoid() * ci.tanh()
            torch.testing.assert_close(y[t, i], hi[0])
        assert not y[length:, i].any()
        torch.testing.assert_close((h[0, i], c[0, i]), (hi[0], ci[0]))
    cell = ConvLSTMCell(2, 3, dtype=F64, normalize=normalize)
    cell.load_state_dict(
        {key.replace("_l0", ""): value for key, value in lstm.state_dict().items()}
    )
    torch.testing.assert_close(cell(x[0])[0], y[0])


def test_the_cell_is_one_step_and_unbatched_input_is_a_batch_of_one():
    cell, unit = (
        ConvNERUCell(2, 4, nonlinearity="modrelu"),
        ConvNERU(2, 4, nonlinearity="modrelu", output="last"),
    )
    unit.load_state_dict(
        {
            re.sub(r"(weight_ih|weight_hh|bias_ih)", r"\1_l0", k): v
            for k, v in cell.state_dict().items()
        }
    )
    x, h = torch.randn(2, 2, 6, 6), torch.randn(2, 4, 6, 6)
    torch.testing.assert_close(cell(x, h), unit(x[None], h[None])[0])
    torch.testing.assert_close(cell(x[0]), unit(x[:1])[0])
    lstm = ConvLSTM(2, 3, 3, 2)
    torch.testing.assert_close(lstm(x)[0], lstm(x[:, None])[0][:, 0])


@pytest.mark.parametrize("kind", [ConvNERU, ConvLSTM])
@pytest.mark.parametrize("output", ["all", "last"])
def test_an_empty_batch_has_empty_states_and_gradients_of_zero(kind, output):
    unit, x = kind(2, 3, output=output), torch.zeros(4, 0, 2, 6, 6, requires_grad=True)
    for lengths in None, torch.zeros(0, dtype=torch.long):
        unit.zero_grad()
        y, _ = unit(x, lengths=lengths)
        assert y.shape == ((4, 0, 3, 6, 6) if output == "all" else (0, 3, 6, 6))
        y.sum().backward()
        assert [p.grad.count_nonzero().item() for p in unit.parameters()] == [0] * len(
            list(unit.parameters())
        )


@pytest.mark.parametrize("kind", [ConvNERU, ConvLSTM])
@layouts
def test_compile_export_and_vmap(kind, layout):
    unit, x, lengths = (
        kind(2, 3).to(memory_format=layout),
        torch.randn(4, 2, 2, 6, 6),
        torch.tensor([4, 2]),
    )
    twin = copy.deepcopy(unit)
    torch.compiler.reset()
    loss = lambda unit, x: unit(x, lengths=lengths)[0].square().sum()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(unit, x).backward()
    loss(twin, x).backward()
    for a, b in zip(unit.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)
    program = torch.export.export(unit.eval(), (x,))
    torch.testing.assert_close(program.module()(x)[0], unit(x)[0])
    torch.testing.assert_close(
        torch.vmap(lambda x: unit(x)[0])(x[None])[0], unit(x)[0], atol=1e-5, rtol=1e-5
    )


def test_autocast_keeps_the_recurrence_in_float32():
    unit, x = ConvNERU(2, 4), torch.randn(4, 1, 2, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = unit(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, unit(x)[0], atol=0.05, rtol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("steps", "channels", "tf32"), [(7, 8, False), (16, 8, False), (150, 64, False), (16, 8, True)]
)
@layouts
def test_graphs_equal_the_loop(steps, channels, tf32, layout, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    unit = ConvNERU(3, channels, num_layers=2, device="cuda").to(memory_format=layout)
    x = torch.randn(steps, 2, 3, 16, 16, device="cuda")
    lengths = torch.tensor([steps, 3], device="cuda")
    results = []
    for backend in ("torch", "reference", "torch"):
        unit.backend = backend
        unit.zero_grad()
        leaf = x.clone().requires_grad_()
        y, hn = unit(leaf, lengths=lengths)
        (y.square().sum() + hn.sum()).backward()
        results.append([y, hn, leaf.grad, *(p.grad for p in unit.parameters())])
    allowed = 2e-2 if tf32 else 1e-4
    for ours, plain, again in zip(*results, strict=True):
        torch.testing.assert_close(
            ours, plain, rtol=allowed, atol=allowed * plain.abs().max().item()
        )
        torch.testing.assert_close(
            ours, again, rtol=allowed, atol=allowed * plain.abs().max().item()
        )


IMAGES = torch.zeros(3, 2, 2, 6, 6)
ERRORS = [
    (lambda: ConvNERU(2, 4, 4), "ConvNERU: kernel_size must be odd.*Got 4"),
    (lambda: ConvLSTM(2, 4, 2), "ConvLSTM: kernel_size must be odd"),
    (lambda: ConvNERUCell(2, 0), "hidden_channels must be at least 1, got 0"),
    (lambda: ConvNERU(2, 4, method="tcvy"), "Did you mean 'tcwy'"),
    (lambda: ConvNERU(2, 4, method="exprnn"), "'exprnn' does not serve kernels.*orth-init"),
    (lambda: ConvNERU(2, 4, 1, method="own"), "serves tall weights"),
    (lambda: ConvNERU(2, 4, method="zeros", init="haar"), "init belongs to constrained"),
    (lambda: ConvNERU(2, 4, memory="reversible"), "memory must be 'store' or 'checkpoint'"),
    (lambda: ConvNERU(2, 4, backend="cudnn"), "'auto', 'torch', 'reference'.*got 'cudnn'"),
    (lambda: ConvNERU(2, 4, nonlinearity="gelu"), "unknown nonlinearity 'gelu'"),
    (lambda: ConvNERU(3, 4)(IMAGES), r"\(T, B, C, H, W\).*C = 3. Got shape \(3, 2, 2, 6, 6\)"),
    (lambda: ConvNERU(2, 4)(IMAGES, torch.zeros(1, 2, 4, 5, 6)), r"hx of shape \(1, 2, 4, 6, 6\)"),
    (
        lambda: ConvNERU(2, 4)(IMAGES, lengths=torch.tensor([0, 3])),
        r"2 whole numbers from 1 to T = 3, got \[0, 3\]",
    ),
    (
        lambda: ConvNERU(2, 4)(IMAGES, lengths=torch.tensor([1.0, 3.0])),
        r"2 whole numbers from 1 to T = 3, got \[1.0, 3.0\]",
    ),
    (
        lambda: ConvNERU(2, 4)(IMAGES[:0]),
        r"ConvNERU: expected at least one step, got input of shape \(0, 2, 2, 6, 6\)",
    ),
    (
        lambda: ConvLSTM(2, 4)(IMAGES.byte()),
        r"ConvLSTM: the input is torch.uint8, but the weights are torch.float32.*\.to",
    ),
    (lambda: ConvNERUCell(2, 4)(IMAGES[0].double()), "ConvNERUCell: the input is torch.float64"),
    (lambda: ConvLSTMCell(2, 4)(IMAGES[0].double()), "ConvLSTMCell: the input is torch.float64"),
    (
        lambda: ConvLSTMCell(2, 4)(IMAGES[0, :1], torch.zeros(1, 4, 6, 6)),
        r"hx = \(h, c\), both of shape \(1, 4, 6, 6\), got \(4, 6, 6\)",
    ),
    (lambda: ConvNERUCell(2, 4)(IMAGES), r"expected input \(B, 2, H, W\)"),
    (
        lambda: conv_rollout(IMAGES, IMAGES[0], torch.zeros(2, 2, 2, 3)),
        r"q odd.*got \(2, 2, 2, 3\)",
    ),
    (
        lambda: conv_rollout(
            IMAGES, IMAGES[0], torch.zeros(2, 2, 3, 3), None, "abs", memory="reversible"
        ),
        "adjoint is not their inverse",
    ),
]


@pytest.mark.parametrize(("call", "words"), ERRORS)
def test_errors(call, words):
    with pytest.raises(ValueError, match=words):
        call()
