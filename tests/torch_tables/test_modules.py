"""Our layers in torch's table of modules, and what torch asks of its own."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck
from torch.func import functional_call

import cwy
from tests.helpers.torch_tables import build, call, common_modules, inputs, tensors

ModuleInfo = common_modules.ModuleInfo
ModuleInput = common_modules.ModuleInput
given = common_modules.FunctionInput


def draw(dtype, *shape):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def plain_rnn(module, parameters, x, *states):
    """Run torch's RNN with the weights of ours."""
    options = {
        "nonlinearity": module.nonlinearity,
        "num_layers": module.num_layers,
        "bidirectional": module.bidirectional,
    }
    rnn = nn.RNN(
        module.input_size,
        module.hidden_size,
        batch_first=module.batch_first,
        dtype=x.dtype,
        **options,
    )
    with torch.no_grad():
        for name, parameter in rnn.named_parameters():
            # Ours has one bias per layer.
            parameter.copy_(getattr(module, name, torch.zeros_like(parameter)))
    return rnn(x, *states)


def modrelu(module, parameters, z):
    return z / z.abs() * (z.abs() + parameters[0]).relu()


def rnn_inputs(info, device, dtype, requires_grad, training, **_):
    x = draw(dtype, 5, 2, 3)
    return [
        ModuleInput(given(3, 4), given(x), reference_fn=plain_rnn),
        ModuleInput(
            given(3, 4, nonlinearity="relu", batch_first=True),
            given(x, draw(dtype, 1, 5, 4)),
            reference_fn=plain_rnn,
        ),
        ModuleInput(
            given(3, 5, num_layers=2, bidirectional=True), given(x), reference_fn=plain_rnn
        ),
        ModuleInput(given(3, 4, nonlinearity="modrelu", reflections=2), given(x)),
        ModuleInput(
            given(3, 4, nonlinearity="abs", bias=False, memory="checkpoint"),
            given(x[:, 0].detach()),
        ),
    ]


def cell_inputs(info, device, dtype, requires_grad, training, **_):
    return [
        ModuleInput(given(3, 4), given(draw(dtype, 2, 3), draw(dtype, 2, 4))),
        ModuleInput(
            given(3, 4, nonlinearity="relu", bias=False), given(draw(dtype, 3), draw(dtype, 4))
        ),
    ]


def neru_inputs(info, device, dtype, requires_grad, training, **_):
    x = draw(dtype, 3, 2, 2, 4, 5)
    return [
        ModuleInput(given(2, 3), given(x)),
        ModuleInput(given(2, 3, nonlinearity="tanh", batch_first=True, num_layers=2), given(x)),
    ]


def neru_cell_inputs(info, device, dtype, requires_grad, training, **_):
    return [ModuleInput(given(2, 3), given(draw(dtype, 2, 2, 4, 5), draw(dtype, 2, 3, 4, 5)))]


def lstm_cell_inputs(info, device, dtype, requires_grad, training, **_):
    return [ModuleInput(given(2, 3), given(draw(dtype, 2, 2, 4, 5)))]


def lstm_inputs(info, device, dtype, requires_grad, training, **_):
    return [ModuleInput(given(2, 3), given(draw(dtype, 3, 2, 2, 4, 5)))]


def modrelu_inputs(info, device, dtype, requires_grad, training, **_):
    return [ModuleInput(given(4), given(draw(dtype, 3, 4)), reference_fn=modrelu)]


TABLE = [
    ModuleInfo(cwy.nn.OrthogonalRNN, module_inputs_func=rnn_inputs),
    ModuleInfo(cwy.nn.OrthogonalRNNCell, module_inputs_func=cell_inputs),
    ModuleInfo(cwy.nn.ConvNERU, module_inputs_func=neru_inputs),
    ModuleInfo(cwy.nn.ConvNERUCell, module_inputs_func=neru_cell_inputs),
    ModuleInfo(cwy.nn.ConvLSTM, module_inputs_func=lstm_inputs),
    ModuleInfo(cwy.nn.ConvLSTMCell, module_inputs_func=lstm_cell_inputs),
    ModuleInfo(cwy.nn.ModReLU, module_inputs_func=modrelu_inputs),
]
every_module = pytest.mark.parametrize("info", TABLE, ids=lambda info: info.module_cls.__name__)
pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_table_has_every_layer():
    assert {info.module_cls.__name__ for info in TABLE} == set(cwy.nn.__all__)


@every_module
def test_forward_is_the_references_and_changes_nothing(info):
    for one in inputs(info):
        module = build(info, one)
        state = copy.deepcopy(module.state_dict())
        before = [x.detach().clone() for x in one.forward_input.args]
        result = call(module, one)
        torch.testing.assert_close(tensors(call(module, one)), tensors(result), rtol=0, atol=0)
        torch.testing.assert_close(
            [x.detach() for x in one.forward_input.args], before, rtol=0, atol=0
        )
        torch.testing.assert_close(module.state_dict(), state, rtol=0, atol=0)
        assert info.module_cls.__name__ in repr(module)
        if one.reference_fn is not None:
            reference = one.reference_fn(module, *one.forward_input.args)
            torch.testing.assert_close(tensors(result), tensors(reference))


@every_module
def test_inputs_of_any_strides(info):
    """As torch's own test: strided inputs, and gradients that come in strided."""
    for one in inputs(info):
        module = build(info, one)
        outputs = tensors(call(module, one))
        strided = [
            torch.stack([x.detach(), x.detach()], dim=-1)[..., 0] for x in one.forward_input.args
        ]
        assert not any(x.is_contiguous() for x in strided if x.numel() > 1)
        others = tensors(module(*(x.requires_grad_() for x in strided)))
        torch.testing.assert_close(others, outputs)
        slopes = [torch.randn_like(out) for out in outputs]
        grads = torch.autograd.grad(outputs, list(module.parameters()), slopes)
        slopes = [torch.stack([slope, slope], dim=-1)[..., 0] for slope in slopes]
        torch.testing.assert_close(
            torch.autograd.grad(others, list(module.parameters()), slopes), grads
        )


@every_module
def test_gradients_of_inputs_and_parameters(info):
    for one in inputs(info):
        module = build(info, one)
        names = [name for name, _ in module.named_parameters()]
        size = len(one.forward_input.args)

        def compute(*values, module=module, names=names, size=size):
            return tuple(
                tensors(
                    functional_call(
                        module, dict(zip(names, values[size:], strict=True)), values[:size]
                    )
                )
            )

        assert gradcheck(compute, (*one.forward_input.args, *module.parameters()), fast_mode=True)


@every_module
def test_precision_copies_and_state_dicts(info):
    for one in inputs(info):
        module = build(info, one)
        outputs = tensors(call(module, one))
        twin = copy.deepcopy(module)
        torch.testing.assert_close(tensors(call(twin, one)), outputs, rtol=0, atol=0)
        other = build(info, one)
        other.load_state_dict(module.state_dict())
        torch.testing.assert_close(tensors(call(other, one)), outputs, rtol=0, atol=0)
        low = tensors(twin.float()(*(x.float() for x in one.forward_input.args)))
        assert all(out.dtype == torch.float32 for out in low)
        torch.testing.assert_close(low, outputs, rtol=1e-3, atol=1e-4, check_dtype=False)


@every_module
def test_device_and_dtype_of_construction(info):
    for one in inputs(info):
        arguments = one.constructor_input
        module = info.module_cls(
            *arguments.args, **arguments.kwargs, device="meta", dtype=torch.float64
        )
        for name, tensor in module.state_dict().items():
            assert tensor.is_meta, name
            assert tensor.dtype == torch.float64, name
        module.to_empty(device="cpu").load_state_dict(build(info, one).state_dict())
        assert all(out.isfinite().all() for out in tensors(call(module, one)))
