"""``HouseholderConfig``: what an adapter computes, and all that users of PEFT expect of a type."""

import copy
import json
import pickle

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import cwy.peft
import peft
from cwy import ops
from cwy.peft import HouseholderConfig
from cwy.peft._versions import SAVES_BIASES
from peft import HRAConfig, PeftModel, get_peft_model
from tests.peft.models import IDS, Images, gpt2, gradients, llama, logits, move, perceptron

KINDS = [(sides, blocks) for sides in ("in", "out", "both") for blocks in (None, 4)]


def matrix(v):
    """The orthogonal matrix of vectors, or of blocks of them."""
    q = ops.cwy_matrix(v)
    if v.dim() == 2:
        return q
    return torch.block_diag(*q)


def adapted(sides="in", blocks=None, model=None, r=4, **options):
    options.setdefault("target_modules", ["0", "2"])
    if model is None:
        model = perceptron()
    return get_peft_model(model, HouseholderConfig(r=r, sides=sides, blocks=blocks, **options))


@pytest.mark.parametrize(("sides", "blocks"), KINDS)
def test_computes_both_products_and_leaves_the_bias_alone(sides, blocks):
    model = move(adapted(sides, blocks)).double()
    x = torch.randn(3, 5, 12, dtype=torch.float64)
    dense = copy.deepcopy(model).base_model.model

    def formed(x):
        for place in (0, 2):
            layer = dense[place]
            weight = layer.base_layer.weight
            if sides != "out":
                weight = weight @ matrix(layer.householder_in["default"])
            if sides != "in":
                weight = matrix(layer.householder_out["default"]) @ weight
            x = nn.functional.linear(x, weight, layer.base_layer.bias)
            if place == 0:
                x = nn.functional.gelu(x)
        return x

    torch.testing.assert_close(model(x), formed(x), rtol=1e-10, atol=1e-10)
    ours = gradients(model, model(x).sin().sum())
    theirs = gradients(dense, formed(x).sin().sum())
    assert len(ours) == 2 * (1 + (sides == "both"))
    for name, gradient in theirs.items():
        torch.testing.assert_close(
            ours[f"base_model.model.{name}"], gradient, rtol=1e-9, atol=1e-10
        )


@pytest.mark.parametrize(("sides", "blocks"), KINDS)
def test_starts_at_the_identity_and_learns(sides, blocks):
    model = adapted(sides, blocks)
    for name, v in model.named_parameters():
        if "householder_" in name:
            assert torch.equal(v[..., ::2], v[..., 1::2])
            gap = matrix(v.double().detach()) - torch.eye(v.shape[:-1].numel())
            assert gap.abs().max() < 1e-14
    x = torch.randn(4, 12)
    torch.testing.assert_close(model(x), perceptron()(x), rtol=0, atol=3e-7)
    for gradient in gradients(model, model(x).sin().sum()).values():
        assert gradient.isfinite().all()
        assert gradient.norm() > 1e-3


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"r": 3}, "r must be even, got 3"),
        ({"r": 0}, "r must be a positive integer, got 0"),
        ({"r": 2.0}, "r must be a positive integer"),
        ({"sides": "left"}, "sides must be one of 'in', 'out', 'both', got 'left'"),
        ({"bias": "lora_only"}, "'householder_only', got 'lora_only'"),
        ({"blocks": 0}, "blocks must be a positive integer"),
        ({"blocks": 5}, "does not divide the 12 features"),
        ({"layers_pattern": "h"}, "layers_pattern needs layers_to_transform"),
        ({"target_modules": "0", "layers_to_transform": 1}, "if target_modules is a string"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options, error):
    with pytest.raises(ValueError, match=error):
        adapted(**options)


def test_layers_that_do_not_fit_are_refused():
    config = HouseholderConfig(r=2, target_modules=["0"])
    with pytest.raises(TypeError, match="Embedding can't be adapted"):
        get_peft_model(nn.Sequential(nn.Embedding(4, 4)), config)
    grouped = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))
    with pytest.raises(NotImplementedError, match="groups=2"):
        get_peft_model(grouped, HouseholderConfig(r=2, target_modules=["0"]))
    attention = nn.Sequential(nn.MultiheadAttention(4, 1))
    with pytest.raises(TypeError, match="MultiheadAttention reads the weight"):
        get_peft_model(attention, HouseholderConfig(r=2, target_modules="all-linear"))


def test_is_saved_and_loaded(tmp_path):
    options = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]}
    model = move(adapted("both", 2, llama(), **options), 0.1)
    model.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "adapter_model.safetensors"))
    base = "base_model.model.model.layers.1.mlp.down_proj"
    assert {f"{base}.householder_in", f"{base}.householder_out"} <= names
    assert "base_model.model.lm_head.weight" in names
    assert len(names) == 2 * 2 * 2 + 1
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["peft_type"] == "HOUSEHOLDER"
    assert (saved["r"], saved["sides"], saved["blocks"]) == (4, "both", 2)
    expected = logits(model)
    for options in ({}, {"low_cpu_mem_usage": True}, {"is_trainable": True}):
        loaded = PeftModel.from_pretrained(llama(), tmp_path, **options)
        assert torch.equal(logits(loaded), expected)
    assert isinstance(peft.PeftConfig.from_pretrained(tmp_path), HouseholderConfig)


def test_several_adapters(tmp_path):
    model = move(adapted("both", model=llama(), target_modules=["q_proj"]), seed=1)
    first = logits(model)
    model.add_adapter("second", HouseholderConfig(r=2, target_modules=["q_proj", "v_proj"]))
    torch.testing.assert_close(logits(model), first)
    model.set_adapter("second")
    move(model, seed=2)
    second = logits(model)
    assert not torch.allclose(first, second)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), logits(llama()))
    model.set_adapter("default")
    assert torch.equal(logits(model), first)

    # Both together are what merging one after the other gives.
    model.base_model.set_adapter(["default", "second"])
    both = logits(model)
    merged = copy.deepcopy(model).merge_and_unload(adapter_names=["default", "second"])
    torch.testing.assert_close(logits(merged), both, rtol=1e-4, atol=1e-5)

    model.save_pretrained(tmp_path, selected_adapters=["second"])
    loaded = PeftModel.from_pretrained(llama(), tmp_path / "second")
    torch.testing.assert_close(logits(loaded), second)
    model.delete_adapter("second")
    model.set_adapter("default")
    assert torch.equal(logits(model), first)


def test_a_batch_of_several_adapters_is_refused():
    config = HouseholderConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    ours = get_peft_model(llama(), config)
    ours.add_adapter("second", config)
    with cwy.peft.install():
        hra = get_peft_model(llama(), HRAConfig(r=2, target_modules=["q_proj"]))
    # PEFT drops the argument for types that do not ask for it, and uses the active adapter.
    with pytest.raises(NotImplementedError, match="set_adapter"):
        ours(input_ids=IDS, adapter_names=["default", "second"])
    with pytest.raises(NotImplementedError, match="set_adapter"):
        ours.generate(input_ids=IDS, adapter_names=["default", "second"], max_new_tokens=1)
    with pytest.raises(NotImplementedError, match="set_adapter"):
        hra(input_ids=IDS, adapter_names=["default", "default"])


@pytest.mark.parametrize(("sides", "blocks"), [("both", None), ("in", 4)])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_is_merged_and_unmerged(make, sides, blocks):
    base = make()
    model = move(adapted(sides, blocks, make(), target_modules="all-linear"))
    expected = logits(model)
    assert not torch.allclose(expected, logits(base), atol=0.1)
    model.merge_adapter(safe_merge=True)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), logits(base), rtol=1e-4, atol=1e-5)
    merged = model.merge_and_unload(safe_merge=True)
    assert type(merged) is type(base)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-5)
    assert not merged._forward_pre_hooks
    assert not merged._forward_hooks


def test_a_safe_merge_refuses_nan():
    model = adapted()
    with torch.no_grad():
        model.base_model.model[0].householder_in["default"][0, 0] = torch.nan
    before = model.base_model.model[0].base_layer.weight.clone()
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_and_unload(safe_merge=True)
    assert torch.equal(model.base_model.model[0].base_layer.weight, before)


@pytest.mark.parametrize("sides", ["in", "out", "both"])
def test_convolutions(sides):
    model = adapted(sides, model=Images(), target_modules=["first", "second", "last"])
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(model(x), Images()(x), rtol=0, atol=1e-6)
    move(model)
    expected = model(x)
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged(x), expected, rtol=1e-4, atol=1e-5)


def test_dtypes_of_the_adapter():
    options = {"target_modules": ["q_proj"]}
    wide = adapted("both", model=llama(torch.bfloat16), **options)
    narrow = get_peft_model(
        llama(torch.bfloat16),
        HouseholderConfig(r=4, sides="both", **options),
        autocast_adapter_dtype=False,
    )
    for model, dtype in ((wide, torch.float32), (narrow, torch.bfloat16)):
        dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
        assert dtypes == {dtype}
        y = logits(model)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y, logits(llama(torch.bfloat16)), rtol=0.02, atol=0.02)
        for gradient in gradients(model, y.float().sin().sum()).values():
            assert gradient.isfinite().all()


def test_what_is_trained():
    model = adapted(model=llama(), target_modules="all-linear", modules_to_save=["lm_head"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 + 1
    assert all("householder_" in name or "modules_to_save" in name for name in trained)
    count, _ = model.get_nb_trainable_parameters()
    assert count == 2 * 4 * (6 * 32 + 48) + 64 * 32


@pytest.mark.skipif(not SAVES_BIASES, reason="this PEFT saves no biases")
def test_which_biases_are_trained():
    for bias, biases in (("none", 0), ("householder_only", 1), ("all", 2)):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model = adapted(target_modules=["0"], bias=bias, model=net)
        names = [n for n, p in model.named_parameters() if n.endswith("bias") and p.requires_grad]
        assert len(names) == biases


@pytest.mark.skipif(not SAVES_BIASES, reason="this PEFT saves no biases")
def test_biases_are_trained_on_the_output_side():
    model = move(adapted("out", target_modules=["0"], bias="householder_only")).double()
    layer = model.base_model.model[0]
    x = torch.randn(3, 12, dtype=torch.float64)
    found = gradients(model, model(x).sin().sum())
    q = matrix(layer.householder_out["default"].detach())
    bias = layer.base_layer.bias.detach().requires_grad_()
    y = nn.functional.linear(x, q @ layer.base_layer.weight, bias)
    y = model.base_model.model[2](nn.functional.gelu(y))
    y.sin().sum().backward()
    torch.testing.assert_close(found["base_model.model.0.base_layer.bias"], bias.grad)


def test_the_key_has_what_peft_reads(tmp_path):
    model = adapted()
    assert model.peft_type == "HOUSEHOLDER"
    assert model.peft_type.value == "HOUSEHOLDER"
    assert set(model.get_model_status().peft_types.values()) == {"HOUSEHOLDER"}
    with pytest.raises(ValueError, match="'HOUSEHOLDER' is not compatible"):
        get_peft_model(perceptron(), HouseholderConfig(target_modules=["0"]), mixed=True)
    model.save_pretrained(tmp_path)
    from peft.utils.hotswap import check_hotswap_configs_compatible

    with pytest.raises(ValueError, match="HOUSEHOLDER was passed"):
        check_hotswap_configs_compatible(model.peft_config["default"], model.peft_config["default"])
    with pytest.raises(ValueError, match="HOUSEHOLDER and LORA"):
        check_hotswap_configs_compatible(model.peft_config["default"], peft.LoraConfig())
    twin = pickle.loads(pickle.dumps(model.peft_config["default"]))
    assert twin.peft_type.value == "HOUSEHOLDER"


def test_injection_without_a_peft_model():
    model = peft.inject_adapter_in_model(HouseholderConfig(r=2, target_modules=["0"]), perceptron())
    assert isinstance(model[0], cwy.peft.HouseholderLayer)
    torch.testing.assert_close(model(torch.ones(1, 12)), perceptron()(torch.ones(1, 12)))


def test_a_compiled_model_computes_the_same():
    model = move(adapted("both", model=llama(), target_modules=["q_proj", "up_proj"]), 0.1)
    expected = logits(model)
    slopes = gradients(model, expected.sin().sum())
    compiled = torch.compile(model, backend="aot_eager")
    actual = compiled(input_ids=IDS).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    model.zero_grad()
    actual.sin().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, slopes[name], rtol=1e-3, atol=1e-4)
    torch._dynamo.reset()
