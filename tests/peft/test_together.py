"""Factors once per forward pass: shared where that is safe, and right where it is not."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import cwy.peft
from cwy.ops.reflect import eager
from cwy.peft import HouseholderConfig
from peft import HRAConfig, get_peft_model
from tests.peft.models import IDS, gradients, llama, logits, move


@pytest.fixture
def counted(monkeypatch):
    """A list that gets the number of vectors of each computation of factors."""
    sizes = []
    form = eager.form

    def counting(v, dtype):
        sizes.append(v.shape[0])
        return form(v, dtype)

    monkeypatch.setattr(eager, "form", counting)
    return sizes


def adapted(sides="in", **options):
    config = HouseholderConfig(r=2, sides=sides, target_modules=["q_proj", "o_proj", "down_proj"])
    return move(get_peft_model(llama(), config, **options), 0.1)


def alone(model):
    """A copy whose layers compute their factors by themselves."""
    twin = copy.deepcopy(model)
    for layer in twin.modules():
        if isinstance(layer, cwy.peft.HouseholderLayer):
            layer.together = None
    return twin


def loss(model, ids=IDS):
    return logits(model, ids).sin().sum()


def test_layers_of_one_shape_share_a_computation(counted):
    model = adapted()
    single = alone(model)
    found = gradients(model, loss(model))
    assert counted == [4, 2]  # q_proj and o_proj of two layers, and down_proj
    counted.clear()
    expected = gradients(single, loss(single))
    assert counted == [1] * 6
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_every_change_of_the_vectors_is_seen():
    model = adapted("both")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(logits(model), logits(alone(model)))
    weight = model.base_model.model.model.layers[0].self_attn.q_proj.householder_in["default"]
    with torch.no_grad():
        before = logits(model)
        assert torch.equal(logits(model), before)
        weight[0] += 1
        between = logits(model)
        assert not torch.equal(between, before)
        # Averages over steps are swapped in so. The version of the tensor does not change.
        weight.data.copy_(weight.data.flip(0))
        assert not torch.equal(logits(model), between)
        torch.testing.assert_close(logits(model), logits(alone(model)))


def test_gradients_accumulate():
    model = adapted("both")
    single = alone(model)
    other = IDS.flip(0) + 5
    expected = gradients(single, loss(single) + loss(single, other))
    model.zero_grad()
    loss(model).backward()
    loss(model, other).backward()
    apart = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    first = loss(model)
    second = loss(model, other)
    second.backward()
    first.backward()
    for name, gradient in expected.items():
        torch.testing.assert_close(apart[name], gradient, rtol=1e-4, atol=1e-5)
        late = model.get_parameter(name).grad
        torch.testing.assert_close(late, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    model = adapted("both")
    expected = gradients(model, loss(model))
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = gradients(model, loss(model))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_whose_backward_pass_runs_later(counted):
    model = adapted("both")
    other = IDS.flip(0) + 5
    expected = gradients(model, loss(model) + loss(model, other))
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.zero_grad()
    first = loss(model)
    with torch.no_grad():
        loss(model)
    second = loss(model, other)
    counted.clear()
    first.backward()
    second.backward()
    assert counted == []  # the recomputation found the factors of the last forward pass
    for name, gradient in expected.items():
        late = model.get_parameter(name).grad
        torch.testing.assert_close(late, gradient, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_around_the_whole_model():
    model = adapted()
    expected = gradients(model, loss(model))
    hidden = checkpoint(lambda ids: logits(model, ids), IDS, use_reentrant=False)
    found = gradients(model, hidden.sin().sum())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_copies_are_independent():
    model = adapted()
    twin = copy.deepcopy(model)
    torch.testing.assert_close(logits(twin), logits(model))
    move(twin, seed=7)
    assert not torch.allclose(logits(twin), logits(model))
    torch.testing.assert_close(logits(twin), logits(alone(twin)))
    loss(twin).backward()
    assert all(p.grad is None for p in model.parameters())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(logits(loaded), logits(model))


def test_parameters_may_be_replaced_converted_and_frozen():
    model = adapted("both")
    logits(model)
    state = {name: torch.randn_like(p) for name, p in model.named_parameters() if p.requires_grad}
    model.load_state_dict(state, strict=False, assign=True)
    torch.testing.assert_close(logits(model), logits(alone(model)))
    model.double()
    torch.testing.assert_close(logits(model), logits(alone(model)))
    name = next(iter(state))
    model.get_parameter(name).requires_grad_(False)
    single = alone(model)
    expected = gradients(single, loss(single))
    found = gradients(model, loss(model))
    assert name not in found
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient)


def test_inference_mode_and_training_do_not_mix():
    model = adapted()
    with torch.inference_mode():
        expected = logits(model)
    with torch.no_grad():
        assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model), expected)
    loss(model).backward()


def test_a_layer_works_outside_of_its_model(counted):
    model = adapted()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    logits(model)
    counted.clear()
    x = torch.randn(3, 32)
    y = layer(x)
    assert counted == [1]
    weight = layer.base_layer.weight + layer.get_delta_weight("default")
    torch.testing.assert_close(y, nn.functional.linear(x, weight))


def test_an_error_in_a_forward_pass_leaves_no_trace():
    model = adapted()
    with pytest.raises(IndexError):
        logits(model, IDS + 100)
    move(model, seed=3)
    torch.testing.assert_close(logits(model), logits(alone(model)))


def test_hra_shares_too(counted):
    with cwy.peft.install():
        config = HRAConfig(r=2, target_modules=["q_proj"], apply_GS=True, init_weights=False)
        model = get_peft_model(llama(), config)
    loss(model).backward()
    assert counted == [2]


@pytest.mark.gpu
def test_a_captured_step_equals_a_plain_one():
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(3)]
    config = HouseholderConfig(r=8, sides="both", target_modules=["0", "1", "2"])
    model = get_peft_model(nn.Sequential(*layers).cuda(), config)
    twin = copy.deepcopy(model)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)

    def step(model, optimizer):
        optimizer.zero_grad(set_to_none=False)
        result = model(x).float().square().mean()
        result.backward()
        optimizer.step()
        return result

    def optimizer_of(model):
        trained = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, capturable=True)

    plain = optimizer_of(twin)
    expected = [step(twin, plain).item() for _ in range(8)]
    captured = optimizer_of(model)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        warm = [step(model, captured).item() for _ in range(3)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = step(model, captured)
    replayed = []
    for _ in range(5):
        with torch.no_grad():
            model(x)
        graph.replay()
        replayed.append(result.item())
    torch.testing.assert_close(warm + replayed, expected, rtol=1e-3, atol=1e-5)
    # A replay changes the vectors without a new version.
    with torch.no_grad():
        torch.testing.assert_close(model(x), twin(x), rtol=2e-2, atol=2e-2)


def test_a_layer_keeps_its_input_and_few_numbers_per_token():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16))
    model = get_peft_model(net, HouseholderConfig(r=4, target_modules=["0"]))
    x = torch.randn(10, 100, 64, dtype=torch.bfloat16)
    kept = {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(x)
    weight = model.base_model.model[0].base_layer.weight
    assert kept.pop(x.untyped_storage().data_ptr()) == 1000 * 64 * 2
    kept.pop(weight.untyped_storage().data_ptr(), None)
    # Four numbers per token, and both factors.
    assert sorted(kept.values()) == sorted([1000 * 4 * 2, 64 * 4 * 2, 64 * 4 * 2])
