"""One set of properties over every registered method: a new method is tested by registering it."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parametrize
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import cwy
from tests.helpers.methods import (
    GOLDEN,
    Layer,
    data,
    every_map,
    every_method,
    free_of,
    loss_of,
    make,
    one_shape,
    train,
)


@every_method
def test_shape_dtype_and_orthogonality(name, size, dtype):
    layer = make(name, size, dtype)
    assert layer.weight.shape == size
    assert layer.weight.dtype == dtype
    assert cwy.orthogonality_error(layer.weight) <= 1e-12
    before = layer.weight.detach().clone()
    train(layer, data(size, dtype), 5)
    assert cwy.orthogonality_error(layer.weight) <= 1e-12
    assert (layer.weight - before).abs().max() > 1e-4, "training moves the weight"


@pytest.mark.parametrize(
    "name", [n for n, m in cwy.METHODS.items() if m.kind != "tall" and not m.on_manifold]
)
def test_states_keep_their_norm_in_float32(name):
    """1e-4 over 1,000 steps, with free parameters as large as long training makes them."""
    layer = make(name, (128, 128), torch.float32 if cwy.METHODS[name].real else torch.complex64)
    with torch.no_grad():
        for p in free_of(layer):
            p += 0.3 * torch.randn_like(p)
    h0 = torch.randn(4, 128, dtype=layer.weight.dtype)
    _, h = cwy.ops.rollout(
        h0.new_zeros(1000, 4, 128),
        h0,
        layer.weight.detach(),
        nonlinearity="identity",
        output="last",
    )
    torch.testing.assert_close(h.norm(dim=-1), h0.norm(dim=-1), rtol=1e-4, atol=0)


@every_map
def test_multiply_is_the_weight_times_each_vector(name, size, dtype):
    layer, x = make(name, size, dtype), data(size, dtype)
    train(layer, x, 3)  # away from the special values of a start
    chart = layer.parametrizations.weight[0]
    with pytest.raises(ValueError, match="multiply: x must be"):
        chart.multiply(*free_of(layer), x[..., :1])
    torch.testing.assert_close(
        chart.multiply(*free_of(layer), x), x @ layer.weight.mT, atol=1e-12, rtol=0
    )


@every_map
def test_gradcheck(name, size, dtype):
    layer = make(name, size, dtype)
    free = [p.detach().requires_grad_() for p in free_of(layer)]
    assert torch.autograd.gradcheck(layer.parametrizations.weight[0], free)
    x = data(size, dtype).requires_grad_()
    assert torch.autograd.gradcheck(layer.parametrizations.weight[0].multiply, [*free, x])


def keep_products(context, op, *given, **options):
    if op in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@every_map
def test_a_checkpoint_may_keep_products(name, size, dtype):
    """torch refuses a kept product that was overwritten."""
    layer = make(name, size, dtype)
    free = free_of(layer)
    x = data(size, dtype).requires_grad_()
    expected = torch.autograd.grad(layer(x).abs().sum(), free)
    contexts = lambda: create_selective_checkpoint_contexts(keep_products)
    y = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
    torch.testing.assert_close(torch.autograd.grad(y.abs().sum(), free), expected)


@every_map
def test_assignment(name, size, dtype):
    """A weight of the method's own set can be assigned; a method without inverse says so."""
    layer, other = make(name, size, dtype), make(name, size, dtype)
    q = other.weight.detach().clone()
    before = copy.deepcopy(layer.state_dict())
    try:
        layer.weight = q
    except ValueError:
        with pytest.raises(ValueError, match="assign"):
            layer.weight = q
        for key, value in layer.state_dict().items():
            assert torch.equal(value, before[key]), "a refused assignment changes nothing"
        return
    torch.testing.assert_close(layer.weight.detach(), q, atol=1e-10, rtol=0)
    x = data(size, dtype)
    loss_of(layer, x).backward()
    for parameter in free_of(layer):
        assert parameter.grad.isfinite().all()
    single = torch.complex64 if dtype.is_complex else torch.float32
    layer.weight = q.to(single)
    torch.testing.assert_close(layer.weight.detach(), q, atol=1e-4, rtol=0)
    layer.weight = q
    for bad in (torch.full_like(q, torch.nan), 2 * q, q[..., :-1]):
        with pytest.raises(ValueError, match=r"n=\d|\(\d"):
            layer.weight = bad
    torch.testing.assert_close(layer.weight.detach(), q, atol=1e-10, rtol=0)


@every_map
def test_a_sample_changes_nothing(name, size, dtype):
    layer = make(name, size, dtype)
    before = layer.weight.detach().clone()
    free = layer.parametrizations.weight[0].sample()
    assert torch.equal(layer.weight, before)
    other = layer.parametrizations.weight[0](*(free if isinstance(free, tuple) else (free,)))
    assert cwy.orthogonality_error(other) <= 1e-12


@every_method
def test_state_dict_round_trip(name, size, dtype, tmp_path):
    layer, other = make(name, size, dtype), make(name, size, dtype)
    train(layer, data(size, dtype), 2)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(other.weight, layer.weight)


@one_shape
def test_state_dict_keys_are_frozen(name, size, dtype):
    frozen = json.loads(GOLDEN.read_text())
    key = f"{name} {'complex' if dtype.is_complex else 'real'}"
    if key not in frozen:
        pytest.skip("a new method: freeze its keys with `python -m tests.golden.freeze`")
    assert list(make(name, size, dtype).state_dict()) == frozen[key]


@every_method
def test_deepcopy_is_independent(name, size, dtype):
    layer = make(name, size, dtype)
    twin = copy.deepcopy(layer)
    before = layer.weight.detach().clone()
    assert torch.equal(twin.weight, before)
    train(twin, data(size, dtype), 2)
    assert torch.equal(layer.weight, before)
    cwy.bake(twin)
    assert torch.equal(layer.weight, before), "baking a copy leaves the original alone"


@every_method
def test_bake(name, size, dtype):
    layer, x = make(name, size, dtype), data(size, dtype)
    loss_of(layer, x).backward()
    with torch.no_grad():
        y = layer(x)
        assert cwy.bake(layer) is layer
    assert type(layer) is Layer
    assert list(layer.state_dict()) == ["weight"]
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.is_contiguous()
    assert not layer.weight.is_conj()
    assert layer.weight.grad is None
    torch.testing.assert_close(layer(x), y, atol=1e-6, rtol=0)


@one_shape
def test_compile(name, size, dtype):
    layer, x = make(name, size, dtype), data(size, dtype)
    twin = copy.deepcopy(layer)
    loss = loss_of(twin, x)
    loss.backward()
    torch.compiler.reset()
    compiled = torch.compile(lambda x: loss_of(layer, x), fullgraph=True, backend="aot_eager")(x)
    compiled.backward()
    torch.testing.assert_close(compiled, loss)
    for ours, theirs in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@one_shape
def test_export(name, size, dtype):
    layer, x = make(name, size, dtype).eval(), data(size, dtype)
    program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x), layer(x))


@one_shape
def test_functional_call_and_ensembles(name, size, dtype):
    # parametrize gives every layer a class of its own, and torch stacks modules of one class: so,
    # inside a model.
    layers, x = [nn.Sequential(make(name, size, dtype)) for _ in range(3)], data(size, dtype)
    state = layers[1].state_dict()
    assert torch.equal(functional_call(layers[0], state, (x,)), layers[1](x))
    parameters, buffers = stack_module_state(layers)
    together = vmap(lambda p, b: functional_call(layers[0], (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(together, torch.stack([layer(x) for layer in layers]))


@one_shape
def test_weight_decay_keeps_it_orthogonal(name, size, dtype):
    single = torch.complex64 if dtype.is_complex else torch.float32
    layer = make(name, size, single)
    train(layer, data(size, single), 100, orthogonal_weight_decay=0.1)
    assert cwy.orthogonality_error(layer.weight) <= 1e-5


@every_method
def test_half_and_double(name, size, dtype):
    layer = make(name, size, dtype)
    if dtype.is_complex:
        # .half() and .float() leave complex parameters alone; real angles beside them must not
        # spoil the weight.
        for moved in (copy.deepcopy(layer).half(), copy.deepcopy(layer).float()):
            assert moved.weight.dtype == dtype
            assert cwy.orthogonality_error(moved.weight) <= 1e-12
        layer.to(torch.complex64)
        assert layer.weight.dtype == torch.complex64
        assert cwy.orthogonality_error(layer.weight) <= 1e-5
        return
    for half, bound in ((torch.bfloat16, 8e-3), (torch.float16, 1e-3)):
        low = copy.deepcopy(layer).to(half)
        assert low.weight.dtype == half
        assert cwy.orthogonality_error(low.weight) <= bound
        if not cwy.METHODS[name].on_manifold:
            # Back again: what is kept beside the parameters was not rounded.
            assert cwy.orthogonality_error(copy.deepcopy(low).double().weight) <= 1e-6
        loss_of(low, data(size, half)).backward()
        assert all(p.grad.isfinite().all() for p in low.parameters())


@every_method
@pytest.mark.gpu
def test_device_moves(name, size, dtype):
    layer = make(name, size, dtype)
    there = copy.deepcopy(layer).to("cuda")
    x = data(size, dtype)
    torch.testing.assert_close(there(x.cuda()).cpu(), layer(x))
    loss_of(layer, x).backward()
    loss_of(there, x.cuda()).backward()
    for ours, theirs in zip(layer.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad.cpu(), ours.grad)
    if cwy.METHODS[name].on_manifold:
        return
    free = there.parametrizations.weight[0].sample()
    assert all(p.is_cuda for p in (free if isinstance(free, tuple) else (free,)))


@every_method
def test_meta_then_materialise(name, size, dtype):
    real = make(name, size, dtype)
    with torch.device("meta"):
        layer = make(name, size, dtype)
    assert layer.weight.is_meta
    layer.to_empty(device="cpu").load_state_dict(real.state_dict())
    assert torch.equal(layer.weight, real.weight)


def test_the_torch_bug_that_bake_avoids():
    """After deepcopy, torch's own removal from one copy breaks the other. When this fails, torch
    has mended it.
    """
    layer = make("cwy", (4, 4), torch.float64)
    twin = copy.deepcopy(layer)
    parametrize.remove_parametrizations(layer, "weight")
    with pytest.raises(AttributeError):
        _ = twin.weight
