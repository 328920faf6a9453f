"""Many layers at once: the same numbers as one at a time, whatever happens in between."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import cwy
from cwy.many import run_together

METHODS = [name for name, method in cwy.METHODS.items() if not name.startswith("rgd")]


def stack(method="cwy", depth=3, size=6, dtype=torch.float64, **options):
    """A chain of layers of one kind, with one of another kind at its end."""
    torch.manual_seed(0)
    layers = [
        cwy.orthogonal(nn.Linear(size, size, dtype=dtype), method=method, **options)
        for _ in range(depth)
    ]
    return nn.Sequential(*layers, cwy.orthogonal(nn.Linear(size, size - 1, dtype=dtype)))


def slopes(model, x):
    """The result, and the gradient of every parameter."""
    model.zero_grad()
    y = model(x)
    y.abs().square().sin().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]


def close(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("method", METHODS)
def test_results_equal_those_of_single_layers(method, device):
    dtype = torch.float64
    if method in ("urnn", "eurnn"):
        dtype = torch.complex128
    columns = 6
    if method == "own":
        columns = 4
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(columns, 6, dtype=dtype, device=device) for _ in range(3))
    for layer in layers:
        cwy.orthogonal(layer, method=method)

    def run():
        layers.zero_grad()
        weights = [layer.weight for layer in layers]
        loss = sum((weight.abs() ** (i + 1)).sin().sum() for i, weight in enumerate(weights))
        loss.backward()
        grads = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
        return [*(weight.detach() for weight in weights), *grads]

    alone = run()
    with cwy.together(layers):
        close(run(), alone)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with cwy.together(layers), mode:
            close([layer.weight for layer in layers], alone[:3])


def calls(model, monkeypatch):
    """A list that grows by one when a map computes a matrix."""
    made = []
    for kind in {type(one.map) for one in cwy.named_constraints(model)}:
        for name in ("matrix", "matrix_and_pull_back"):
            before = getattr(kind, name)

            def counted(self, *free, before=before):
                result = before(self, *free)
                if result is not None:
                    made.append(self.batch)
                return result

            monkeypatch.setattr(kind, name, counted)
    return made


def test_one_call_computes_all_of_a_kind(monkeypatch):
    model = stack(depth=4)
    made = calls(model, monkeypatch)
    with cwy.together(model):
        model(torch.randn(5, 6, dtype=torch.float64)).sum().backward()
    assert sorted(made) == [(), (4,)]


@pytest.mark.parametrize("complex_", [False, True])
@pytest.mark.parametrize("layer", ["wide", "conv", "batched"])
def test_other_shapes(layer, complex_):
    dtype = torch.complex128 if complex_ else torch.float64
    torch.manual_seed(1)
    made = []
    for _ in range(3):
        if layer == "wide":
            one = nn.Linear(7, 4, dtype=dtype)
        elif layer == "conv":
            one = nn.Conv1d(2, 5, 3, dtype=dtype)
        else:
            one = nn.Module()
            one.weight = nn.Parameter(torch.randn(2, 5, 5, dtype=dtype))
        made.append(cwy.orthogonal(one))
    model = nn.ModuleList(made)

    def run():
        model.zero_grad()
        loss = sum((one.weight.real.sin() * (i + 1)).sum() for i, one in enumerate(model))
        loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    alone = run()
    with cwy.together(model):
        close(run(), alone)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 600])
def test_kernels_serve_a_stack(size):
    torch.manual_seed(0)
    layers = [nn.Linear(size, size, device="cuda") for _ in range(3)]
    model = nn.Sequential(*(cwy.orthogonal(layer) for layer in layers))
    x = torch.randn(5, size, device="cuda")
    alone = slopes(model, x)
    with cwy.together(model):
        stacked = slopes(model, x)
    for a, b in zip(stacked, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert cwy.orthogonality_error(model) < 1e-5


def test_weights_with_different_signs_keep_them():
    model = stack(depth=3)
    q = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    q = q * q.det().sign()
    flip = torch.ones(6, dtype=torch.float64)
    flip[0] = -1
    model[0].weight = q
    model[1].weight = q * flip
    with cwy.together(model):
        torch.testing.assert_close(model[0].weight, q)
        torch.testing.assert_close(model[1].weight, q * flip)


def test_gradients_accumulate_inside_one_block_and_after_it():
    model = stack()
    one, two = torch.randn(2, 5, 6, dtype=torch.float64)

    def accumulate(inside):
        model.zero_grad()
        model(one).sin().sum().backward()
        late = model(two).cos().sum()
        if inside:
            late.backward()
        return late

    accumulate(inside=True)
    alone = [p.grad.clone() for p in model.parameters()]
    for inside in (True, False):
        with cwy.together(model):
            late = accumulate(inside)
        if not inside:
            late.backward()
        close([p.grad for p in model.parameters()], alone)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recompute_with_the_same_weights(reentrant, monkeypatch):
    model = stack(depth=4)
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    alone = slopes(model, x)
    made = calls(model, monkeypatch)
    model.zero_grad()
    with cwy.together(model):
        y = x
        for layer in model:
            y = checkpoint(layer, y, use_reentrant=reentrant)
    y.abs().square().sin().sum().backward()
    close([y.detach(), *(p.grad for p in model.parameters())], alone)
    if not reentrant:
        # The four layers of a kind once, and the last layer, which is computed by itself, twice.
        assert sorted(made) == [(), (), (4,)]


def test_a_step_inside_a_block_is_noticed():
    model, other = stack(), stack()
    x = torch.randn(5, 6, dtype=torch.float64)
    results = []
    for net in (model, other):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        block = cwy.together(net)
        if net is model:
            block.__enter__()
        for _ in range(3):
            optimizer.zero_grad()
            net(x).sin().sum().backward()
            optimizer.step()
        if net is model:
            block.__exit__(None, None, None)
        results.append([net(x).detach()])
    close(*results)


def test_frozen_shared_unknown_and_nested():
    model = stack(depth=4)
    model[1].requires_grad_(False)
    shared = nn.Sequential(model[0], model[1], model[0], model[2], model[3])
    stranger = cwy.orthogonal(nn.Linear(6, 6, dtype=torch.float64))
    x = torch.randn(5, 6, dtype=torch.float64)

    def run():
        shared.zero_grad()
        y = stranger(shared(x))
        y.sin().sum().backward()
        grads = [p.grad.clone() for p in shared.parameters() if p.requires_grad]
        return [y.detach(), *grads, stranger.bias.grad.clone()]

    alone = run()
    stranger.zero_grad()
    with cwy.together(shared), cwy.together(shared[:2]), cwy.together(shared):
        close(run(), alone)
    stranger.zero_grad()
    close(run(), alone)


def test_an_error_inside_a_block_ends_it():
    model = run_together(stack())
    with pytest.raises(RuntimeError):
        model(torch.randn(5, 7, dtype=torch.float64))
    found = [one.map.stack for one in cwy.named_constraints(model)]
    assert any(found)
    assert not any(one.serves for one in found if one is not None)


def test_second_derivatives_raise():
    model = stack()
    x = torch.randn(5, 6, dtype=torch.float64)
    with cwy.together(model):
        loss = model(x).sin().sum()
        free = model[0].parametrizations.weight.original
        (slope,) = torch.autograd.grad(loss, free, create_graph=True)
        with pytest.raises(RuntimeError):
            slope.sum().backward()


def plain(depth=3):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6, dtype=torch.float64) for _ in range(depth)), nn.ReLU())


@pytest.mark.parametrize(
    ("where", "count"),
    [
        (nn.Linear, 3),
        ((nn.Linear, nn.Conv1d), 3),
        ("[01]", 2),
        (lambda name, layer: name == "2", 1),
    ],
)
def test_constrain_takes_types_patterns_and_functions(where, count, monkeypatch):
    model = plain()
    done = cwy.constrain(model, where, reflections=4)
    assert [one.module for one in done] == [one.module for one in cwy.named_constraints(model)]
    assert len(done) == count
    assert cwy.orthogonality_error(model) < 1e-13
    if count > 1:
        made = calls(model, monkeypatch)
        model(torch.randn(5, 6, dtype=torch.float64)).sum().backward()
        assert made == [(count,)]


@pytest.mark.parametrize("where", [nn.Conv2d, "nothing*", lambda name, layer: False])
def test_constrain_refuses_what_matches_nothing(where):
    with pytest.raises(ValueError, match="no layer"):
        cwy.constrain(plain(), where)


def test_constrain_changes_nothing_when_it_refuses():
    model = plain()
    cwy.constrain(model, "1")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="already"):
        cwy.constrain(model, nn.Linear)
    with pytest.raises(ValueError, match="no tensor"):
        cwy.constrain(plain(), lambda name, layer: True)
    with pytest.raises(TypeError, match="where"):
        cwy.constrain(plain(), 7)
    assert model.state_dict().keys() == before.keys()
    # A later layer refuses the method: the first one stays as it was.
    mixed = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6))
    before = copy.deepcopy(mixed.state_dict())
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="own"):
        cwy.constrain(mixed, nn.Linear, method="own")
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in mixed.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_constrained_model_is_copied_loaded_and_baked():
    model = plain()
    cwy.constrain(model, nn.Linear)
    x = torch.randn(5, 6, dtype=torch.float64)
    alone = slopes(model, x)
    close(slopes(copy.deepcopy(model), x), alone)
    other = plain()
    cwy.constrain(other, nn.Linear)
    other.load_state_dict(model.state_dict())
    close(slopes(other, x), alone)
    torch.testing.assert_close(cwy.bake(copy.deepcopy(model))(x), alone[0])
    program = torch.export.export(cwy.bake(model), (x,))
    assert not [node for node in program.graph.nodes if "cwy" in str(node.target)]


def test_a_constrained_model_compiles():
    model = plain()
    cwy.constrain(model, nn.Linear)
    x = torch.randn(5, 6, dtype=torch.float64)
    alone = slopes(model, x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    y = compiled(x)
    model.zero_grad()
    y.abs().square().sin().sum().backward()
    close([y.detach(), *(p.grad for p in model.parameters())], alone)


def test_a_compiled_model_has_one_op_for_all_layers_of_a_kind():
    model = plain()
    cwy.constrain(model, nn.Linear)
    x = torch.randn(5, 6, dtype=torch.float64)
    program = torch.export.export(model, (x,))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("cwy.cwy_matrix.default") == 1
    torch.testing.assert_close(program.module()(x), model(x))
    assert all(one.map.given is None for one in cwy.named_constraints(model))


def test_what_changes_after_constrain_is_noticed(monkeypatch):
    model = plain(depth=4)
    cwy.constrain(model, nn.Linear)
    x = torch.randn(5, 6, dtype=torch.float64)
    model(x)
    model[0].requires_grad_(False)
    made = calls(model, monkeypatch)
    model(x)
    assert sorted(made) == [(), (3,)]
    model.to(torch.float32)
    made.clear()
    model(x.float())
    assert sorted(made) == [(), (3,)]
    cwy.bake(model[1])
    made.clear()
    model(x.float())
    assert sorted(made) == [(), (2,)]
    model[2] = cwy.orthogonal(nn.Linear(6, 6))
    made.clear()
    model(x.float())
    assert sorted(made) == [(), (2,)]


def test_transforms_go_one_at_a_time():
    model = plain()
    cwy.constrain(model, nn.Linear)
    free = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(5, 6, dtype=torch.float64)

    def loss(free, row):
        return torch.func.functional_call(model, free, (row,)).sin().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(free, x)
    model.zero_grad()
    model(x).sin().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(each[name].sum(0), p.grad)


def test_a_fused_step_inside_a_block_is_noticed():
    """It changes parameters without a new version."""
    model = stack()
    x = torch.randn(5, 6, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
    with cwy.together(model):
        model(x).sin().sum().backward()
        optimizer.step()
        inside = model(x)
    torch.testing.assert_close(inside, model(x))


def test_a_program_takes_the_parameters_that_the_model_has_then():
    """Compiled with others by functional_call, or exported, where each gets its gradient."""
    model = plain()
    cwy.constrain(model, nn.Linear)
    x = torch.randn(5, 6, dtype=torch.float64)
    others = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    run = lambda given: torch.func.functional_call(model, given, (x,)).sin().sum()
    torch.compiler.reset()
    compiled = torch.compile(torch.func.grad(run), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(others), torch.func.grad(run)(others))
    exported = torch.export.export(model, (x,)).module()
    exported(x).sum().backward()
    assert all(p.grad is not None for p in exported.parameters())


class Checkpointed(nn.Module):
    """Layers whose shapes can't tell a recomputation from another."""

    def __init__(self, context=None):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, dtype=torch.float64) for _ in range(3)])
        self.context = {} if context is None else {"context_fn": context}

    def whole(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.bmm(x.sin()[None], x.mT[None]).sin()

    def forward(self, x):
        return checkpoint(self.whole, x, use_reentrant=False, **self.context)


def some_products(ctx, op, *given, **options):
    if op == torch.ops.aten.bmm.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    "context", [None, lambda: create_selective_checkpoint_contexts(some_products)]
)
def test_another_pass_before_the_backward_one_changes_no_recomputation(context):
    model = Checkpointed(context)
    cwy.constrain(model, nn.Linear)
    x = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    parameters = [x, *model.parameters()]
    expected = torch.autograd.grad(model.whole(x).sum(), parameters)
    loss = model(x).sum()
    with torch.no_grad():
        model(x)
    model.whole(x)
    with cwy.together(model):
        again = model(x).sum()
    for one in (loss, again):
        torch.testing.assert_close(torch.autograd.grad(one, parameters), expected)


def test_modes_and_tangents_go_one_at_a_time():
    model = plain()
    cwy.constrain(model, nn.Linear)
    x = torch.randn(5, 6, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    assert counter.get_total_flops() > 0
    with forward_ad.dual_level():
        for one in cwy.named_constraints(model):
            chain = one.module.parametrizations[one.name]
            v = chain.original.detach()
            del chain.original
            chain.original = forward_ad.make_dual(v, torch.ones_like(v))
        for _ in range(2):
            assert forward_ad.unpack_dual(model(x)).tangent is not None


def test_gradients_are_those_of_single_layers_where_some_are_frozen_or_unused():
    layers = [nn.Linear(4, 4, dtype=torch.complex128) for _ in range(2)]
    model = nn.Sequential(*layers)
    cwy.constrain(model, nn.Linear)
    for layer in model:
        layer.parametrizations.weight.original0.requires_grad_(False)
    model(torch.randn(3, 4, dtype=torch.complex128)).real.sum().backward()
    assert all(layer.parametrizations.weight.original1.grad is not None for layer in model)
    real = stack()
    first, *rest = cwy.named_constraints(real)
    with cwy.together(real):
        getattr(first.module, first.name).sum().backward()
    assert first.free[0].grad is not None
    assert all(one.free[0].grad is None for one in rest)


def test_a_model_finds_its_stacks_again():
    model = plain()
    cwy.constrain(model, nn.Linear)
    x = torch.randn(5, 6, dtype=torch.float64)
    calls = next(iter(model._forward_pre_hooks.values())).__self__
    members = lambda: [len(one.members) for one in calls._stacks]
    before = members()
    cwy.orthogonal(nn.Linear(2, 2))
    with cwy.together(model):
        model(x)
    model(x)
    assert members() == before
    free = next(iter(cwy.named_constraints(model))).free[0]
    free.requires_grad_(False)
    model(x)
    assert members() != before
    free.requires_grad_(True)
    model(x)
    assert members() == before


def halves(model, x, together):
    """A loss of two checkpointed regions with one layer in common, the second together."""
    first = checkpoint(model[0], x, use_reentrant=False)
    block = contextlib.nullcontext()
    if together:
        block = cwy.together(model)
    with block:
        second = checkpoint(lambda x: model[1](model[0](x)), x, use_reentrant=False)
    return first.sin().sum() + second.sin().sum()


def test_checkpoints_alone_and_together_before_one_backward_pass():
    x = torch.randn(5, 6, dtype=torch.float64)
    model = stack()
    parameters = [*model[:2].parameters()]
    alone = torch.autograd.grad(halves(model, x, together=False), parameters)
    fresh = stack()
    fresh_parameters = [*fresh[:2].parameters()]
    for _ in range(2):
        # In the first round the block is the first that the layers see.
        found = torch.autograd.grad(halves(fresh, x, together=True), fresh_parameters)
        close(found, alone)
        with torch.no_grad():
            for x_ in (*parameters, *fresh_parameters):
                x_.mul_(1.5)
        alone = torch.autograd.grad(halves(model, x, together=False), parameters)


def test_a_constrained_model_is_checkpointed_alone_and_together():
    model = Checkpointed(None)
    cwy.constrain(model, nn.Linear)
    x = torch.randn(8, 8, dtype=torch.float64)
    layer = next(one.module for one in cwy.named_constraints(model))
    parameters = [*model.parameters()]
    expected = torch.autograd.grad((model.whole(x).sum() + layer(x).sin().sum()), parameters)
    alone = checkpoint(layer, x, use_reentrant=False)
    loss = model(x).sum() + alone.sin().sum()
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), expected)


def test_a_step_of_another_model_changes_no_recomputation():
    model = stack()
    other = nn.Linear(6, 1, dtype=torch.float64)
    optimizer = torch.optim.Adam(other.parameters())
    x = torch.randn(5, 6, dtype=torch.float64)
    parameters = [*model[:2].parameters()]
    expected = torch.autograd.grad(model[1](model[0](x)).sin().sum(), parameters)
    with cwy.together(model):
        y = checkpoint(lambda x: model[1](model[0](x)), x, use_reentrant=False)
        other(y.detach()).sum().backward()
        optimizer.step()
        found = torch.autograd.grad(y.sin().sum(), parameters)
    close(found, expected)


@pytest.mark.parametrize("used", [3, 2])
def test_batches_of_gradients(used):
    model = stack()
    x = torch.randn(2, 6, dtype=torch.float64)
    layers = model[:used]
    parameters = [*layers.parameters()]
    directions = torch.eye(12, dtype=torch.float64).reshape(12, 2, 6)
    options = {"is_grads_batched": True}
    expected = torch.autograd.grad(layers(x), parameters, directions, **options)
    with cwy.together(model):
        found = torch.autograd.grad(layers(x), parameters, directions, **options)
    close(found, expected)
