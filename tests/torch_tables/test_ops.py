"""Our functions on tensors in torch's table of operators, and what torch asks of its own."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import vmap

import cwy
from cwy import ops
from tests.helpers.torch_tables import opinfo as core

SampleInput = core.SampleInput
pytestmark = pytest.mark.filterwarnings("ignore")
FIELDS = (torch.float64, torch.complex128)
SHAPES = [(1, 1), (4, 4), (6, 3), (2, 5, 3)]


def draw(dtype, requires_grad, *shape):
    return torch.randn(*shape, dtype=dtype, requires_grad=requires_grad)


def vectors(info, device, dtype, requires_grad, **_):
    for shape in SHAPES:
        yield SampleInput(draw(dtype, requires_grad, *shape))


def vectors_and_signs(info, device, dtype, requires_grad, **_):
    for shape in SHAPES:
        columns = shape[-2] if info.name == "cwy_matrix" else shape[-1]
        signs = draw(dtype, False, *shape[:-2], columns).sgn()
        yield SampleInput(draw(dtype, requires_grad, *shape), signs=signs)


def products(info, device, dtype, requires_grad, **_):
    for index, shape in enumerate(SHAPES):
        x = draw(dtype, requires_grad, *shape[:-2], 2, shape[-2])
        yield SampleInput(draw(dtype, requires_grad, *shape), args=(x, index % 2 == 1))


def reflected(info, device, dtype, requires_grad, **_):
    for index, shape in enumerate(SHAPES):
        units = torch.Size(shape[:-1]).numel()
        v = draw(dtype, requires_grad, *shape)
        yield SampleInput(draw(dtype, requires_grad, 2, units), args=(v, index % 2 == 1))


def recurrences(info, device, dtype, requires_grad, **_):
    for n, nonlinearity in ((1, "tanh"), (4, "relu"), (3, "modrelu"), (3, "identity")):
        states = (
            draw(dtype, requires_grad, 2, n),
            cwy.init.haar(n, dtype=dtype).requires_grad_(requires_grad),
        )
        yield SampleInput(
            draw(dtype, requires_grad, 4, 2, n),
            args=(*states, draw(dtype, requires_grad, n), nonlinearity),
        )


def image_recurrences(info, device, dtype, requires_grad, **_):
    kernel = cwy.init.haar(18, 2, dtype=dtype).mT.reshape(2, 2, 3, 3)
    states = (draw(dtype, requires_grad, 2, 2, 3, 4), kernel.requires_grad_(requires_grad))
    yield SampleInput(
        draw(dtype, requires_grad, 3, 2, 2, 3, 4),
        args=(*states, draw(dtype, requires_grad, 2), "tanh"),
    )


def describe(op, samples, dtypes=FIELDS, **options):
    name = op.__name__
    settings = {
        "supports_out": False,
        "supports_forward_ad": True,
        "supports_fwgrad_bwgrad": True,
        **options,
    }
    return core.OpInfo(
        name, op=op, dtypes=core._dispatch_dtypes(dtypes), sample_inputs_func=samples, **settings
    )


REAL = (torch.float64,)
TABLE = [
    describe(ops.cwy_matrix, vectors_and_signs),
    describe(ops.tcwy_matrix, vectors_and_signs),
    describe(ops.cwy_multiply, products),
    describe(ops.wy_factors, vectors),
    describe(ops.reflect, reflected, (torch.float64,)),
    describe(ops.rollout, recurrences, REAL),
    describe(ops.conv_rollout, image_recurrences, REAL),
]
CASES = [
    pytest.param(info, dtype, id=f"{info.name}-{dtype}")
    for info in TABLE
    for dtype in sorted(info.dtypes, key=str)
]
every_op = pytest.mark.parametrize(("info", "dtype"), CASES)


def outputs(result):
    if isinstance(result, torch.Tensor):
        return (result,)
    return tuple(part for part in result if part is not None)


def tensors(sample):
    return [x for x in (sample.input, *sample.args) if isinstance(x, torch.Tensor)]


def function(info, sample):
    """Return the call of a sample as a function of its tensors."""
    rest = [x for x in sample.args if not isinstance(x, torch.Tensor)]
    return lambda *inputs: outputs(info.op(*inputs, *rest, **sample.kwargs))


def test_the_table_has_every_function():
    # The inverse map has no gradient, and is tested by what it inverts.
    assert {info.name for info in TABLE} == set(ops.__all__) - {"WY", "householder_vectors"}


@every_op
def test_gradients(info, dtype):
    for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
        call = function(info, sample)
        options = {"fast_mode": True, "check_forward_ad": info.supports_forward_ad}
        assert gradcheck(call, tensors(sample), **options)
        assert gradgradcheck(call, tensors(sample), fast_mode=True)


@every_op
def test_strides_conjugate_and_negative_views(info, dtype):
    for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
        call = function(info, sample)
        expected = call(*tensors(sample))
        slopes = [torch.randn_like(out) for out in expected]
        grads = torch.autograd.grad(expected, tensors(sample), slopes)

        views = [tensors(sample.noncontiguous())]
        views.append([torch._neg_view(-x.detach()).requires_grad_() for x in tensors(sample)])
        if dtype.is_complex:
            views.append(
                [x.detach().conj().resolve_conj().conj().requires_grad_() for x in tensors(sample)]
            )
        for inputs in views:
            result = call(*inputs)
            torch.testing.assert_close(result, expected)
            torch.testing.assert_close(torch.autograd.grad(result, inputs, slopes), grads)


@every_op
def test_vmap_is_a_loop(info, dtype):
    for sample in info.sample_inputs("cpu", dtype, requires_grad=False):
        call = function(info, sample)
        many = [torch.stack([x, x.flip(0)]) for x in tensors(sample)]
        together = vmap(call)(*many)
        apart = [call(*(x[i] for x in many)) for i in range(2)]
        torch.testing.assert_close(
            together, tuple(torch.stack(parts) for parts in zip(*apart, strict=True))
        )


@every_op
def test_meta_tensors_have_the_results_shape(info, dtype):
    for sample in info.sample_inputs("cpu", dtype, requires_grad=False):
        expected = function(info, sample)(*tensors(sample))
        move = lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x
        meta = sample.transform(move)
        found = function(info, meta)(*tensors(meta))
        assert [(x.shape, x.dtype, x.device.type) for x in found] == [
            (x.shape, x.dtype, "meta") for x in expected
        ]
