"""``install``: PEFT's HRA on our ops, held to PEFT's own outputs, gradients and checkpoints."""

import pytest
import torch
from safetensors.torch import load_file

import cwy.peft
import peft
from cwy.peft import hra
from peft import HRAConfig, PeftModel, get_peft_model
from tests.peft.models import Images, gradients, llama, logits, move, perceptron


@pytest.fixture(autouse=True)
def clean():
    yield
    cwy.peft.uninstall()


def pair(make, seed=0, **options):
    """The same adapter, PEFT's and ours, with the same vectors."""
    options.setdefault("r", 4)
    torch.manual_seed(seed)
    theirs = get_peft_model(make(), HRAConfig(**options))
    with cwy.peft.install():
        torch.manual_seed(seed)
        ours = get_peft_model(make(), HRAConfig(**options))
    assert type(theirs.base_model) is peft.HRAModel
    assert type(ours.base_model) is hra.HRAModel
    return theirs, ours


@pytest.mark.parametrize("make", [perceptron, Images])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"init_weights": False},
        {"init_weights": False, "r": 3},
        {"init_weights": False, "apply_GS": True},
        {"init_weights": False, "apply_GS": True, "r": 7},
    ],
)
@pytest.mark.filterwarnings("ignore:The symmetric initialization")
def test_equals_pefts(make, options):
    targets = ["0", "2"]
    x = torch.randn(6, 12)
    if make is Images:
        targets = ["first", "second", "last"]
        x = torch.randn(2, 3, 8, 8)
    theirs, ours = pair(make, target_modules=targets, **options)
    assert set(theirs.state_dict()) == set(ours.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    for _ in range(2):
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
        expected = gradients(theirs, theirs(x).sin().sum())
        found = gradients(ours, ours(x).sin().sum())
        assert set(found) == set(expected)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5)
        # Once more after a move, which ends the paired start.
        move(theirs, 0.3)
        ours.load_state_dict(theirs.state_dict())
    merged = ours.merge_and_unload(safe_merge=True)
    torch.testing.assert_close(merged(x), theirs(x), rtol=1e-4, atol=1e-5)


def test_checkpoints_go_both_ways(tmp_path):
    options = {"target_modules": ["q_proj", "down_proj"], "bias": "none"}
    theirs, ours = pair(llama, **options)
    move(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    with cwy.peft.install():
        loaded = PeftModel.from_pretrained(llama(), tmp_path / "theirs")
    assert type(loaded.base_model) is hra.HRAModel
    torch.testing.assert_close(logits(loaded), logits(theirs), rtol=1e-4, atol=1e-5)
    move(ours, seed=5)
    ours.save_pretrained(tmp_path / "ours")
    names = set(load_file(tmp_path / "ours" / "adapter_model.safetensors"))
    assert names == set(load_file(tmp_path / "theirs" / "adapter_model.safetensors"))
    assert all(name.endswith(".hra_u") for name in names)
    back = PeftModel.from_pretrained(llama(), tmp_path / "ours")
    assert type(back.base_model) is peft.HRAModel
    torch.testing.assert_close(logits(back), logits(ours), rtol=1e-4, atol=1e-5)


def test_the_matrix_of_an_adapter_is_pefts():
    options = {"target_modules": ["0"], "init_weights": False}
    for gram_schmidt in (False, True):
        theirs, ours = pair(perceptron, apply_GS=gram_schmidt, **options)
        for reverse in (False, True):
            expected = theirs.base_model.model[0].get_delta_weight("default", reverse)
            found = ours.base_model.model[0].get_delta_weight("default", reverse)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_with_gram_schmidt_a_dependent_vector_is_no_reflection():
    with cwy.peft.install():
        config = HRAConfig(r=4, target_modules=["0"], apply_GS=True)
        model = get_peft_model(perceptron(), config)
    layer = model.base_model.model[0]
    v = layer.hra_u["default"].detach()
    assert torch.equal(v[:, 0], v[:, 1])
    unit = torch.linalg.qr(v[:, ::2].double()).Q
    expected = torch.eye(12, dtype=torch.float64) - 2 * unit @ unit.mT
    torch.testing.assert_close(
        layer.get_delta_weight("default").double(), expected, atol=1e-5, rtol=0
    )
    for gradient in gradients(model, model(torch.randn(3, 12)).sin().sum()).values():
        assert gradient.isfinite().all()
        assert (gradient[:, 1::2] == 0).all()


def test_only_new_models_are_ours():
    config = HRAConfig(r=2, target_modules=["0"])
    before = get_peft_model(perceptron(), config)
    installed = cwy.peft.install()
    assert type(before.base_model) is peft.HRAModel
    assert type(before.base_model.model[0]) is peft.tuners.hra.HRALinear
    direct = peft.HRAModel(perceptron(), config, "default")
    assert type(direct.model[0]) is peft.tuners.hra.HRALinear
    inside = get_peft_model(perceptron(), config)
    assert isinstance(inside.base_model.model[0], hra.HRALinear)
    with installed:
        pass
    assert type(get_peft_model(perceptron(), config).base_model) is peft.HRAModel
    cwy.peft.install()
    with cwy.peft.install():
        pass
    assert type(get_peft_model(perceptron(), config).base_model) is hra.HRAModel
    cwy.peft.uninstall()
    assert type(get_peft_model(perceptron(), config).base_model) is peft.HRAModel
    x = torch.randn(2, 12)
    torch.testing.assert_close(inside(x), perceptron()(x))


def test_several_adapters_multiply_in_pefts_order():
    theirs, ours = pair(perceptron, target_modules=["0"], init_weights=False)
    for model in (theirs, ours):
        torch.manual_seed(9)
        model.add_adapter("second", HRAConfig(r=3, target_modules=["0"], init_weights=False))
        model.base_model.set_adapter(["default", "second"])
    x = torch.randn(4, 12)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    theirs.merge_adapter()
    ours.merge_adapter()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    ours.unmerge_adapter()
    ours.delete_adapter("second")
    theirs.unmerge_adapter()
    theirs.delete_adapter("second")
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
