"""``save_as_lora``: a LoRA without loss, which plain PEFT loads where ``cwy`` can't be imported."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import cwy.peft
import peft
from cwy.peft import HouseholderConfig, save_as_lora
from cwy.peft._versions import SAVES_BIASES
from peft import HRAConfig, LoraConfig, PeftModel, get_peft_model
from tests.peft.models import Images, gpt2, llama, logits, move, perceptron


def close(actual, expected):
    """Return whether results are equal to 1e-5, relative to the largest."""
    return (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("sides", "blocks", "rank"),
    [("in", None, 4), ("out", None, 4), ("both", None, 8), ("both", 4, 32)],
)
@pytest.mark.parametrize("make", [llama, gpt2])
def test_equals_the_adapter(make, sides, blocks, rank, tmp_path):
    targets = ["q_proj", "down_proj", "lm_head"]
    if make is gpt2:
        targets = ["c_attn", "c_proj"]
    config = HouseholderConfig(r=4, sides=sides, blocks=blocks, target_modules=targets)
    model = move(get_peft_model(make(), config))
    returned = save_as_lora(model, tmp_path)
    assert (returned.r, returned.lora_alpha) == (rank, rank)
    loaded = PeftModel.from_pretrained(make(), tmp_path)
    config = loaded.peft_config["default"]
    assert isinstance(config, LoraConfig)
    assert (config.r, config.lora_alpha) == (rank, rank)
    with torch.no_grad():
        expected = logits(model)
        assert not close(logits(make()), expected)
        assert close(logits(loaded), expected)
        assert close(logits(loaded.merge_and_unload()), expected)


@pytest.mark.parametrize("sides", ["in", "both"])
def test_convolutions(sides, tmp_path):
    targets = ["first", "second", "last"]
    model = get_peft_model(Images(), HouseholderConfig(r=2, sides=sides, target_modules=targets))
    move(model)
    save_as_lora(model, tmp_path)
    loaded = PeftModel.from_pretrained(Images(), tmp_path)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert close(loaded(x), model(x))


def test_hra_and_one_of_several_adapters(tmp_path):
    with cwy.peft.install():
        options = {"target_modules": ["0", "2"], "init_weights": False}
        model = get_peft_model(perceptron(), HRAConfig(r=3, **options))
        model.add_adapter("second", HRAConfig(r=2, apply_GS=True, **options))
    x = torch.randn(3, 12)
    model.set_adapter("second")
    with torch.no_grad():
        save_as_lora(model, tmp_path / "second")
        loaded = PeftModel.from_pretrained(perceptron(), tmp_path / "second")
        assert close(loaded(x), model(x))
        save_as_lora(model, tmp_path / "first", adapter_name="default")
        model.set_adapter("default")
        loaded = PeftModel.from_pretrained(perceptron(), tmp_path / "first")
        assert close(loaded(x), model(x))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ValueError, match="2 adapters are active"):
        save_as_lora(model, tmp_path)


@pytest.mark.skipif(not SAVES_BIASES, reason="this PEFT saves no biases")
def test_modules_to_save_and_biases_go_along(tmp_path):
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2))

    for bias in ("all", "householder_only"):
        config = HouseholderConfig(
            r=2, sides="both", target_modules=["0"], modules_to_save=["2"], bias=bias
        )
        model = move(get_peft_model(net(), config))
        save_as_lora(model, tmp_path)
        loaded = PeftModel.from_pretrained(net(), tmp_path)
        x = torch.randn(3, 6)
        with torch.no_grad():
            assert close(loaded(x), model(x))


def test_what_can_not_be_exported_is_refused(tmp_path):
    plain = get_peft_model(perceptron(), LoraConfig(target_modules=["0"]))
    with pytest.raises(ValueError, match="without layers of cwy"):
        save_as_lora(plain, tmp_path)
    with pytest.raises(TypeError, match="PeftModel, got Sequential"):
        save_as_lora(perceptron(), tmp_path)
    model = get_peft_model(perceptron(), HouseholderConfig(r=2, target_modules=["0"]))
    with pytest.raises(ValueError, match="no adapter 'other'"):
        save_as_lora(model, tmp_path, adapter_name="other")
    model.merge_adapter()
    with pytest.raises(ValueError, match="merged"):
        save_as_lora(model, tmp_path)
    for options in ({"dilation": 2}, {"padding": 1, "padding_mode": "circular"}):
        base = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, **options))
        model = get_peft_model(base, HouseholderConfig(r=2, target_modules=["0"]))
        with pytest.raises(NotImplementedError, match="LoRA ignores dilation"):
            save_as_lora(model, tmp_path)


@pytest.mark.slow
def test_loads_in_a_process_without_cwy(tmp_path):
    config = HouseholderConfig(r=2, sides="both", blocks=2, target_modules=["q_proj", "up_proj"])
    model = move(get_peft_model(llama(), config))
    save_as_lora(model, tmp_path / "lora")
    llama().save_pretrained(tmp_path / "base")
    code = (
        "import json, sys, torch\n"
        "sys.modules['cwy'] = None\n"
        "from peft import PeftModel\n"
        "from transformers import LlamaForCausalLM\n"
        "base = LlamaForCausalLM.from_pretrained(sys.argv[1] + '/base')\n"
        "model = PeftModel.from_pretrained(base, sys.argv[1] + '/lora').eval()\n"
        "ids = torch.arange(24).reshape(2, 12)\n"
        "print(json.dumps(model(input_ids=ids).logits.tolist()))\n"
        "try:\n"
        "    import cwy\n"
        "except ImportError:\n"
        "    sys.exit(0)\n"
        "sys.exit(1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = logits(model)
    assert close(torch.tensor(json.loads(done.stdout.splitlines()[-1])), expected)
    assert peft.PeftConfig.from_pretrained(tmp_path / "lora").peft_type == "LORA"
