"""Bases of every kind, long training, and versions of PEFT that do not fit."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import cwy
import cwy.peft
import peft
from cwy import ops
from cwy.peft import HouseholderConfig, _versions, save_as_lora
from peft import PeftModel, get_peft_model
from tests.peft.models import gradients, llama, logits, move

TARGETS = ["q_proj", "o_proj", "down_proj"]


def quantized():
    """A model with int8 weights."""
    quantization = pytest.importorskip("torchao.quantization")
    model = llama()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


@pytest.mark.parametrize("sides", ["in", "both"])
def test_a_quantized_base(sides, tmp_path):
    base = quantized()
    weight = base.model.layers[0].self_attn.q_proj.weight
    assert type(weight).__module__.startswith("torchao")
    plain = logits(quantized())
    model = get_peft_model(base, HouseholderConfig(r=4, sides=sides, target_modules=TARGETS))
    torch.testing.assert_close(logits(model), plain, rtol=1e-4, atol=1e-5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = logits(model)[..., 3].mean()
        found = gradients(model, loss)
        assert all(g.norm() > 0 for g in found.values())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05

    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(quantized(), tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(model))
    # A LoRA on the same base computes the same: both read the weights as the base does.
    save_as_lora(model, tmp_path / "lora")
    lora = PeftModel.from_pretrained(quantized(), tmp_path / "lora")
    torch.testing.assert_close(logits(lora), logits(model), rtol=1e-3, atol=1e-4)
    with pytest.raises(TypeError, match="quantized weight of Linear can't be merged"):
        model.merge_and_unload()


def test_hra_on_a_quantized_base():
    with cwy.peft.install():
        config = peft.HRAConfig(r=4, target_modules=TARGETS)
        model = get_peft_model(quantized(), config)
    torch.testing.assert_close(logits(model), logits(quantized()), rtol=1e-4, atol=1e-5)
    assert all(g.norm() > 0 for g in gradients(model, logits(model).sin().sum()).values())


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 4])
def test_bitsandbytes(bits, tmp_path):
    bnb = pytest.importorskip("bitsandbytes")
    layer = {8: bnb.nn.Linear8bitLt, 4: bnb.nn.Linear4bit}[bits]

    def net():
        torch.manual_seed(0)
        options = {"has_fp16_weights": False} if bits == 8 else {"compute_dtype": torch.bfloat16}
        plain = nn.Linear(128, 128)
        made = layer(128, 128, **options)
        made.load_state_dict(plain.state_dict())
        return nn.Sequential(made).cuda()

    x = torch.randn(16, 128, device="cuda", dtype=torch.bfloat16)
    config = HouseholderConfig(r=8, sides="both", target_modules=["0"])
    model = get_peft_model(net(), config)
    torch.testing.assert_close(model(x), net()(x), rtol=0.05, atol=0.05)
    move(model)
    assert all(g.norm() > 0 for g in gradients(model, model(x).float().sin().sum()).values())
    save_as_lora(model, tmp_path)
    lora = PeftModel.from_pretrained(net(), tmp_path)
    torch.testing.assert_close(lora(x), model(x), rtol=0.1, atol=0.1)


def test_the_weight_of_a_linear_layer_is_not_read():
    class Closed(nn.Linear):
        """A layer that computes, and whose weight raises when it is read."""

        def forward(self, x):
            return x @ self._parameters["weight"].mT + self._parameters["bias"]

        def __getattr__(self, name):
            if name == "weight" and self.__dict__.get("closed"):
                raise AssertionError("the weight was read")
            return super().__getattr__(name)

    layer = Closed(8, 8)
    model = get_peft_model(
        nn.Sequential(layer), HouseholderConfig(r=2, sides="both", target_modules=["0"])
    )
    layer.closed = True
    assert len(gradients(model, model(torch.randn(3, 8)).sin().sum())) == 2


def _layer(sides, bias=True):
    """An adapted layer in float64."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 8, bias=bias)).double()
    config = HouseholderConfig(r=2, sides=sides, target_modules=["0"])
    return move(get_peft_model(net, config, autocast_adapter_dtype=False))


def _nodes(tensor):
    """The names of all nodes of the graph of a tensor."""
    names = []
    waiting = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        names.append(node.name())
        waiting += [after for after, _ in node.next_functions if after is not None]
    return names


@pytest.mark.parametrize("sides", ["in", "both"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_frozen_layer_is_one_node_of_the_graph(sides, bias):
    model = _layer(sides, bias)
    base = model.base_model.model[0].base_layer
    x = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
    trained = [x, *(p for p in model.parameters() if p.requires_grad)]

    def found():
        y = model(x)
        first = torch.autograd.grad(y.sin().sum(), trained, retain_graph=True)
        again = torch.autograd.grad(y.sin().sum(), [x], create_graph=True)
        second = torch.autograd.grad(again[0].square().sum(), [x])
        return y, *first, *second

    y, *rest = found()
    assert "_AdaptedBackward" in _nodes(y)
    # A hook must see the call, so the parts run apart.
    calls = []
    handle = base.register_forward_hook(lambda *given: calls.append(given))
    apart, *expected = found()
    assert len(calls) == 1
    assert "_AdaptedBackward" not in _nodes(apart)
    torch.testing.assert_close([y, *rest], [apart, *expected])
    handle.remove()
    assert "_AdaptedBackward" in _nodes(model(x))


def test_a_layer_that_is_trained_or_replaced_runs_as_it_is():
    x = torch.randn(3, 12, dtype=torch.float64)
    model = _layer("both")
    base = model.base_model.model[0].base_layer
    before = model(x)
    base.weight.requires_grad_()
    base.bias.requires_grad_()
    torch.testing.assert_close(model(x), before)
    found = gradients(model, model(x).sin().sum())
    assert sum("base_layer" in name and g.norm() > 0 for name, g in found.items()) == 2
    base.requires_grad_(False)
    # Offloading replaces the forward pass of a layer in this way.
    base.forward = lambda x: nn.functional.linear(x, 2 * base.weight, base.bias)
    torch.testing.assert_close(model(x) - base.bias, 2 * (before - base.bias))


def test_what_tools_replace_or_watch_is_seen(monkeypatch):
    model = _layer("both")
    base = model.base_model.model[0].base_layer
    x = torch.randn(3, 12, dtype=torch.float64)
    before = model(x)
    # A bias that is a buffer.
    bias = base.bias.detach() + 1
    del base.bias
    base.register_buffer("bias", bias)
    torch.testing.assert_close(model(x), before + 1)
    calls = []

    def forward(layer, x):
        calls.append(layer)
        return nn.functional.linear(x, layer.weight, layer.bias)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    model(x)
    assert calls == [base]


def test_a_checkpoint_may_lose_its_hooks_before_it_runs_again():
    model = _layer("both")
    x = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    hook = model.base_model.model[0].base_layer.register_forward_hook(lambda *given: None)
    y = checkpoint(model, x, use_reentrant=False)
    hook.remove()
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("sides", ["in", "out", "both"])
def test_a_result_may_be_written_to(sides):
    model = _layer(sides)
    x = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).relu().sum(), x)
    (found,) = torch.autograd.grad(model(x).relu_().sum(), x)
    torch.testing.assert_close(found, expected)


def test_a_model_on_the_meta_device_has_shapes():
    base = nn.Sequential(nn.Linear(12, 8)).to("meta")
    model = get_peft_model(base, HouseholderConfig(r=2, sides="both", target_modules=["0"]))
    assert model(torch.randn(3, 12, device="meta")).shape == (3, 8)


@pytest.mark.parametrize("blocks", [None, 2])
def test_batches_of_gradients(blocks):
    base = nn.Sequential(nn.Linear(12, 8, dtype=torch.float64))
    config = HouseholderConfig(r=2, sides="both", blocks=blocks, target_modules=["0"])
    model = move(get_peft_model(base, config))
    x = torch.randn(4, 12, dtype=torch.float64, requires_grad=True)
    gradients = torch.randn(5, 4, 8, dtype=torch.float64)
    y = model(x)
    (found,) = torch.autograd.grad(y, x, gradients, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in gradients]
    torch.testing.assert_close(found, torch.stack(one_by_one))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_decides_the_dtype_of_the_result(dtype):
    x = torch.randn(3, 12, dtype=dtype)
    model = _layer("both").to(dtype)
    base = model.base_model.model[0].base_layer
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        assert y.dtype == base(x).dtype
    found = gradients(model, y.float().sin().sum())
    base.register_forward_hook(lambda *given: None)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    expected = gradients(model, y.float().sin().sum())
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@pytest.mark.slow
def test_stays_orthogonal_over_a_thousand_steps():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).bfloat16()
    config = HouseholderConfig(r=8, sides="both", target_modules=["0", "2"])
    model = get_peft_model(net, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in trained]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    target = torch.randn(64, 64).bfloat16()
    for _ in range(1000):
        x = torch.randn(64, 64, dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(x) - x @ target).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for parameter, before in zip(trained, start, strict=True):
        assert parameter.dtype == torch.float32
        assert (parameter - before).norm() > 0.5 * before.norm()
        assert cwy.orthogonality_error(ops.cwy_matrix(parameter.detach())) <= 1e-5


def test_a_peft_that_does_not_fit_is_refused():
    with pytest.raises(ImportError, match=r"PEFT 0\.18 or newer, found 0\.17\.1"):
        _versions._check("0.17.1", [])
    with pytest.raises(ImportError, match="which has no peft"):
        _versions._check("0.99.0", ["peft.mapping.X"])
    assert _versions._missing() == []


@pytest.mark.skipif(_versions.SAVES_BIASES, reason="this PEFT saves biases")
def test_an_old_peft_would_lose_biases():
    with pytest.raises(ValueError, match="needs a newer PEFT"):
        HouseholderConfig(r=2, bias="all")


def test_a_missing_name_is_found(monkeypatch):
    monkeypatch.delattr("peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING")
    assert _versions._missing() == ["peft.mapping.PEFT_TYPE_TO_TUNER_MAPPING"]


def test_without_peft_the_error_names_the_extra():
    code = (
        "import sys\n"
        "import cwy\n"
        "assert 'peft' not in sys.modules and 'transformers' not in sys.modules\n"
        "sys.modules['peft'] = None\n"
        "import cwy.peft\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert 'Install it with pip install "cwy[peft]"' in done.stderr
