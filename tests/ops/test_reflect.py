"""``cwy.ops.reflect``: one reflection at a time is the truth, and compilers see one op."""

import importlib

import pytest
import torch
from torch.library import opcheck

from cwy import ops
from cwy.testing import orthogonality_error
from tests.helpers.families import FAMILIES, vectors

# The function hides the module of the same name.
reference = importlib.import_module("cwy.ops.reflect.reference")
eager = importlib.import_module("cwy.ops.reflect.eager")
factors = importlib.import_module("cwy.ops.reflect.factors")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Units, reflections, blocks. L may exceed N.
SIZES = [(1, 1, None), (6, 4, None), (5, 9, None), (33, 17, None), (24, 3, 4), (6, 7, 2)]


def inputs(units, size, blocks, dtype=torch.float64, device="cpu"):
    torch.manual_seed(units + size)
    x = torch.randn(2, 3, units, dtype=dtype, device=device)
    if blocks is None:
        v = torch.randn(units, size, dtype=dtype, device=device)
    else:
        v = torch.randn(blocks, units // blocks, size, dtype=dtype, device=device)
    return x.requires_grad_(), v.requires_grad_()


def with_gradients(form, x, v):
    """A result and both gradients of a function of it that is not symmetric."""
    y = form(x, v)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype, device=y.device).reshape(y.shape)
    return (y.detach(), *torch.autograd.grad((y.sin() * weights).sum(), (x, v)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize(("units", "size", "blocks"), SIZES)
def test_equals_one_reflection_at_a_time(units, size, blocks, adjoint, device):
    x, v = inputs(units, size, blocks, device=device)
    actual = with_gradients(lambda x, v: ops.reflect(x, v, adjoint), x, v)
    truth = with_gradients(lambda x, v: reference.reflect(x, v, adjoint), x, v)
    torch.testing.assert_close(actual, truth, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("units", "size", "blocks"), SIZES)
def test_factors_of_many_layers_with_a_bias(units, size, blocks, device):
    x, v = inputs(units, size, blocks, device=device)
    other = torch.randn_like(v).requires_grad_()
    bias = torch.randn(units, dtype=x.dtype, device=device, requires_grad=True)

    def together(x, v):
        first, second = eager.factors_of([v, other], x.dtype)
        return eager.multiply(eager.multiply(x, first), second, bias)

    def apart(x, v):
        return reference.reflect(reference.reflect(x, v) - bias, other) + bias

    torch.testing.assert_close(
        with_gradients(together, x, v), with_gradients(apart, x, v), rtol=1e-9, atol=1e-9
    )
    found = torch.autograd.grad(together(x, v).sin().sum(), (other, bias))
    expected = torch.autograd.grad(apart(x, v).sin().sum(), (other, bias))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("units", "size"), [(128, 4), (32, 8)])
def test_both_ways_through_the_op_are_the_same(units, size, dtype, device):
    torch.manual_seed(0)
    x = torch.randn(20, units, device=device).to(dtype).requires_grad_()
    v = torch.randn(units, size, device=device, requires_grad=True)

    def in_parts(x, v):
        kind = factors.factor_dtype(v, x.dtype)
        return eager.multiply(x, eager.factors_of([v], kind)[0])

    y, dx, dv = with_gradients(in_parts, x, v)
    whole = with_gradients(ops.reflect, x, v)
    assert (y.dtype, dx.dtype, dv.dtype) == (dtype, dtype, torch.float32)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close((y, dx), whole[:2], rtol=0, atol=8 * eps)
    assert (dv - whole[2]).norm() <= 8 * eps * whole[2].norm()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hard_vectors_stay_orthogonal(family, dtype):
    v = vectors(family, 64, 8, torch.float32).requires_grad_()
    x = torch.eye(64, dtype=dtype, requires_grad=True)
    y = ops.reflect(x, v)
    dx, dv = torch.autograd.grad(y.float().square().sin().sum(), (x, v))
    assert dx.isfinite().all()
    assert dv.isfinite().all()
    assert orthogonality_error(y.float()) < 8 * torch.finfo(dtype).eps
    if family == "zero":
        zero = (v == 0).all(0)
        assert (dv[:, zero] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("units", "size"), [(64, 8), (384, 16), (1024, 32), (48, 16), (16, 40)])
def test_half_precision_is_within_two_roundings(units, size, dtype, device):
    torch.manual_seed(units)
    v = torch.randn(units, size, device=device)
    # Activations as layers see them: an offset, and a feature that is larger than the others.
    x = torch.randn(256, units, device=device) + 0.3
    x[:, 0] *= 10
    x = x.to(dtype)
    truth = reference.reflect(x.double(), v.double())
    one_rounding = (truth.to(dtype).double() - truth).norm()
    for kind in (torch.bfloat16, torch.float16):
        with torch.autocast(device, kind):
            y = ops.reflect(x, v)
        assert y.dtype == dtype
        assert (y.double() - truth).norm() <= 2 * one_rounding
    assert torch.equal(ops.reflect(x, v), y)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients(dtype, device):
    torch.manual_seed(0)
    x = torch.randn(64, 256, device=device).to(dtype).requires_grad_()
    v = torch.randn(256, 16, device=device, requires_grad=True)
    g = torch.randn(64, 256, device=device).to(dtype)
    dx, dv = torch.autograd.grad(ops.reflect(x, v), (x, v), g)
    exact = (x.detach().double().requires_grad_(), v.detach().double().requires_grad_())
    truth = torch.autograd.grad(reference.reflect(*exact), exact, g.double())
    assert dx.dtype == dtype
    assert dv.dtype == torch.float32
    for actual, expected in zip((dx, dv), truth, strict=True):
        error = (actual.double() - expected).norm() / expected.norm()
        assert error < 3 * torch.finfo(dtype).eps


def test_keeps_the_activations_and_few_numbers_per_row():
    x = torch.randn(1000, 64, dtype=torch.bfloat16, requires_grad=True)
    v = torch.randn(64, 4, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel() * t.element_size()) or t, lambda t: t
    ):
        ops.reflect(x, v)
    rows = 1000 * (64 + 4) * 2
    factors = 2 * 2 * v.numel() + 4 * (4 * 4 + 2 * 4)
    assert sum(kept) == rows + factors + 4 * v.numel()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("units", "size", "blocks"), [(16, 2, None), (24, 2, 3), (6, 4, None)])
def test_opcheck(units, size, blocks, dtype, device):
    x, v = inputs(units, size, blocks, torch.float32, device)
    x = x.detach().to(dtype).requires_grad_()
    opcheck(torch.ops.cwy.reflect.default, (x, v, False))
    opcheck(torch.ops.cwy.reflect.default, (x.transpose(0, 1), v, True))


def test_a_compiler_sees_one_op():
    x, v = inputs(24, 3, 2)

    class Model(torch.nn.Module):
        def forward(self, x, v):
            return ops.reflect(x, v)

    program = torch.export.export(Model(), (x.detach(), v.detach()))
    ours = [node for node in program.graph.nodes if "cwy" in str(node.target)]
    assert len(ours) == 1
    compiled = torch.compile(ops.reflect, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(with_gradients(compiled, x, v), with_gradients(ops.reflect, x, v))
    torch._dynamo.reset()


def test_transforms_are_right():
    x, v = inputs(7, 3, None)
    (_, slope, _) = with_gradients(ops.reflect, x, v)

    def loss(x):
        y = ops.reflect(x, v)
        weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
        return (y.sin() * weights).sum()

    torch.testing.assert_close(torch.func.grad(loss)(x), slope)
    tangent = torch.ones_like(x)
    _, moved = torch.func.jvp(lambda x: ops.reflect(x, v), (x,), (tangent,))
    torch.testing.assert_close(moved, ops.reflect(tangent, v))
    each = torch.func.vmap(lambda x: ops.reflect(x, v))(x)
    torch.testing.assert_close(each, ops.reflect(x, v))


@pytest.mark.parametrize("blocks", [None, 2])
def test_a_second_derivative_is_right_or_raises(blocks):
    x, v = inputs(6, 3, blocks)
    assert torch.autograd.gradgradcheck(ops.reflect, (x, v))

    def in_parts(x):
        return eager.multiply(x, eager.factors_of([v], x.dtype)[0])

    assert torch.autograd.gradgradcheck(in_parts, (x,))
    (first,) = torch.autograd.grad(in_parts(x).sin().sum(), v, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    compiled = torch.compile(ops.reflect, backend="aot_eager", fullgraph=True)
    (first,) = torch.autograd.grad(compiled(x, v).sin().sum(), v, create_graph=True)
    with pytest.raises(RuntimeError, match="aot_autograd"):
        first.sum().backward()
    torch._dynamo.reset()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_vectors_may_be_strided(dtype, device):
    torch.manual_seed(0)
    x = torch.randn(20, 128, device=device).to(dtype).requires_grad_()
    v = torch.randn(128, 4, device=device, requires_grad=True)
    strided = v.detach().mT.contiguous().mT.requires_grad_()
    assert not strided.is_contiguous()
    expected = with_gradients(ops.reflect, x, v)
    torch.testing.assert_close(with_gradients(ops.reflect, x, strided), expected)

    def in_parts(x, v):
        kind = factors.factor_dtype(v, x.dtype)
        return eager.multiply(x, eager.factors_of([v], kind)[0])

    expected = with_gradients(in_parts, x, v)
    torch.testing.assert_close(with_gradients(in_parts, x, strided), expected)


def test_inputs_may_be_strided_and_empty():
    x, v = inputs(8, 3, None)
    strided = x.detach().transpose(0, 1)
    torch.testing.assert_close(ops.reflect(strided, v), ops.reflect(x, v).transpose(0, 1))
    assert ops.reflect(x[:0], v).shape == (0, 3, 8)
    one = ops.reflect(x[0, 0], v)
    torch.testing.assert_close(one, ops.reflect(x, v)[0, 0])


@pytest.mark.parametrize(
    ("x", "v", "error"),
    [
        ([1.0], torch.ones(1, 1), "x must be a torch.Tensor"),
        (torch.ones(3), torch.ones(4, 2), r"so x must be \('...', 4\)"),
        (torch.ones(3), torch.ones(3), r"\(N, L\)"),
        (torch.ones(3), torch.ones(3, 2, dtype=torch.complex64), "must be real"),
        (torch.ones(3), torch.ones(3, 2, dtype=torch.int32), "float16 to float64"),
        (torch.ones(3), torch.ones(3, 2, device="meta"), "must be on cpu"),
    ],
)
def test_errors(x, v, error):
    with pytest.raises((TypeError, ValueError), match=error):
        ops.reflect(x, v)
