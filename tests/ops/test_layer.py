"""A recurrent layer as one node of autograd: the same numbers as in parts."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import cwy
from cwy.ops import cwy_matrix
from cwy.ops.recurrence.layer import whole_layer
from cwy.ops.recurrence.nonlinearities import NONLINEARITIES
from cwy.ops.recurrence.rollout import run

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def tensors(steps=5, batch=3, features=4, n=6, dtype=torch.float64, device="cpu", bias=True):
    torch.manual_seed(0)
    like = {"dtype": dtype, "device": device}
    given = {
        "x": torch.randn(steps, batch, features, **like),
        "h0": torch.randn(batch, n, **like),
        "v": torch.randn(n, n, **like),
        "weight": torch.randn(n, features, **like),
        "bias": 0.1 * torch.randn(n, **like) if bias else None,
    }
    for tensor in given.values():
        if tensor is not None:
            tensor.requires_grad_()
    signs = torch.ones(n, **like)
    signs[0] = -1
    return given, signs


def attempted(given, signs, f):
    return whole_layer(
        given["x"], given["h0"], given["v"], signs, given["weight"], given["bias"], f
    )


def whole(given, signs, f):
    found = attempted(given, signs, f)
    assert found is not None
    return found


def in_parts(given, signs, f):
    inputs = nn.functional.linear(given["x"], given["weight"])
    q = cwy_matrix(given["v"], signs=signs)
    return run(inputs, given["h0"], q, given["bias"], f)


def slopes(results, given, **options):
    loss = sum((result.sin() * (i + 1)).sum() for i, result in enumerate(results))
    return torch.autograd.grad(loss, [t for t in given.values() if t is not None], **options)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("f", NONLINEARITIES)
def test_results_and_gradients_equal_those_of_the_parts(f, bias, device):
    given, signs = tensors(bias=bias, device=device)
    if device == "cuda" and f in ("relu", "tanh"):
        # cuDNN runs these in float64. It has no loop of ours.
        assert attempted(given, signs, f) is None
        return
    ours = whole(given, signs, f)
    theirs = in_parts(given, signs, f)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(slopes(ours, given), slopes(theirs, given))
    assert type(ours[0].grad_fn).__name__ == "_LayerBackward"


def test_one_result_may_be_unused():
    given, signs = tensors()
    for used in (0, 1):
        ours = slopes([whole(given, signs, "tanh")[used]], given)
        torch.testing.assert_close(ours, slopes([in_parts(given, signs, "tanh")[used]], given))


@pytest.mark.parametrize("frozen", ["x", "v", "weight"])
def test_only_what_needs_a_gradient_gets_one(frozen):
    given, signs = tensors()
    given[frozen].requires_grad_(False)
    states, _ = whole(given, signs, "relu")
    states.sum().backward()
    assert {name for name, tensor in given.items() if tensor.grad is None} == {frozen}


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_loss_that_is_kept_holds_no_matrix(device):
    given, signs = tensors(dtype=torch.float32, device=device)
    states, _ = whole(given, signs, "modrelu")
    states.sum().backward()
    node = states.grad_fn
    held = [*vars(node).values()]
    held += [cell.cell_contents for cell in node.pull_back.__closure__]
    assert not any(isinstance(one, torch.Tensor) for one in held)
    with pytest.raises(RuntimeError, match="freed"):
        _ = node.saved_tensors


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_second_derivatives_and_batches_of_gradients(device):
    given, signs = tensors(steps=3, batch=2, n=3, features=2, device=device)
    names = [*given]

    def states(*values):
        return whole(dict(zip(names, values, strict=True)), signs, "leaky_relu")

    values = tuple(given.values())
    torch.autograd.gradcheck(states, values, check_batched_grad=True)
    torch.autograd.gradgradcheck(states, values)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_autocast_maps_the_inputs(device):
    given, signs = tensors(dtype=torch.float32, device=device)
    with torch.autocast(device, torch.bfloat16):
        ours = whole(given, signs, "relu")
        theirs = in_parts(given, signs, "relu")
    assert ours[0].dtype == theirs[0].dtype
    torch.testing.assert_close(ours, theirs)
    exact = {
        name: tensor if tensor is None else tensor.detach().double().requires_grad_()
        for name, tensor in given.items()
    }
    truth = slopes(in_parts(exact, signs.double(), "relu"), exact)
    for a, b, true in zip(slopes(ours, given), slopes(theirs, given), truth, strict=True):
        assert a.dtype == b.dtype
        limit = 2 * (b - true).abs().max() + 1e-5
        assert (a - true).abs().max() <= limit


def test_autocast_leaves_float64_alone():
    given, signs = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        ours = whole(given, signs, "relu")
    torch.testing.assert_close(ours, in_parts(given, signs, "relu"))


def test_what_must_see_the_parts_gets_them():
    given, signs = tensors()
    call = (given["x"], given["h0"], given["v"], signs, given["weight"], given["bias"], "tanh")
    with torch.no_grad():
        assert whole_layer(*call) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert whole_layer(*call) is None
    with torch.autograd.forward_ad.dual_level():
        assert whole_layer(*call) is None
    halves = [t.half() if isinstance(t, torch.Tensor) else t for t in call]
    assert whole_layer(*halves) is None
    few = tensors(n=16)[0]["v"][:, :1]
    wide, wide_signs = tensors(n=16)
    rest = (wide["weight"], wide["bias"], "tanh")
    assert whole_layer(wide["x"], wide["h0"], few, wide_signs, *rest) is None


def test_an_output_that_is_written_to_raises():
    given, signs = tensors()
    states, _ = whole(given, signs, "tanh")
    with torch.no_grad():
        states.mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        states.sum().backward()


def nodes(y):
    """The names of all nodes of a graph."""
    found = set()
    todo = [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            found.add(type(node).__name__)
            todo += [following for following, _ in node.next_functions]
    return found


def test_a_module_hands_over_its_weights_unless_others_watch_or_compute_them():
    torch.manual_seed(0)
    rnn = cwy.nn.OrthogonalRNN(4, 6, num_layers=2, dtype=torch.float64)
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    call = (x, torch.zeros(3, 6, dtype=torch.float64), "_l0")
    found = rnn._whole_layer(*call)
    assert found is not None
    torch.testing.assert_close(found, rnn._recur(*call, None, "all"))
    with cwy.together(rnn):
        assert rnn._whole_layer(*call) is None
    with nn.utils.parametrize.cached():
        assert rnn._whole_layer(*call) is None

    def region():
        rnn(x)
        return rnn._whole_layer(*call)

    assert checkpoint(region, use_reentrant=False) is None
    assert rnn._whole_layer(*call) is not None
    hook = rnn.parametrizations.weight_hh_l0[0].register_forward_hook(lambda *given: None)
    assert rnn._whole_layer(*call) is None
    hook.remove()
    assert rnn._whole_layer(*call) is not None
    nn.utils.parametrize.register_parametrization(rnn, "weight_hh_l0", nn.Identity())
    assert rnn._whole_layer(*call) is None


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("n", [32, 190, 300])
def test_a_layer_on_a_gpu_is_one_node(n, autocast):
    torch.manual_seed(0)
    rnn = cwy.nn.OrthogonalRNN(7, n, num_layers=2, nonlinearity="relu", device="cuda")
    x = torch.randn(20, 5, 7, device="cuda")

    def slopes():
        rnn.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            y, h = rnn(x)
        (y.float().sin().sum() + h.float().cos().sum()).backward()
        return y, [y, h, *(p.grad.clone() for p in rnn.parameters())]

    y, ours = slopes()
    assert "_LayerBackward" in nodes(y)
    rnn.backend = "cuda"
    y, theirs = slopes()
    assert "_LayerBackward" not in nodes(y)
    tolerance = {"rtol": 1e-3, "atol": 1e-3}
    if autocast:
        tolerance = {"rtol": 3e-2, "atol": 3e-1}
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.gpu
def test_a_layer_on_a_gpu_is_computed_in_parts_where_others_need_its_weight():
    rnn = cwy.nn.OrthogonalRNN(7, 32, num_layers=2, nonlinearity="modrelu", device="cuda")
    x = torch.randn(20, 5, 7, device="cuda", requires_grad=True)
    alone = rnn(x)[0]
    with cwy.together(rnn):
        assert "_TogetherBackward" in nodes(rnn(x)[0])
    with nn.utils.parametrize.cached():
        assert "_LayerBackward" not in nodes(rnn(x)[0])
    again = checkpoint(lambda x: rnn(x)[0], x, use_reentrant=False)
    torch.testing.assert_close(again, alone)
    seen = []
    hook = rnn.parametrizations.weight_hh_l0[0].register_forward_hook(lambda *given: seen.append(1))
    rnn(x)
    assert seen
    hook.remove()
    assert "_LayerBackward" in nodes(rnn(x)[0])
