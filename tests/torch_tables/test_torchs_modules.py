"""Every module of torch's own table: each of its matrices can be constrained, and the module then computes the same."""

import copy

import pytest
import torch
from torch import nn

import cwy

# torch's table is private: its tests may change between versions, and what is missing is skipped.
common_modules = pytest.importorskip("torch.testing._internal.common_modules")
pytestmark = pytest.mark.filterwarnings("ignore")
LAZY = nn.parameter.UninitializedParameter


def matrices(module):
    """Yield each submodule with the name of a matrix that is its own."""
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if not isinstance(parameter, LAZY) and parameter.dim() > 1:
                yield layer, name


def inputs(info, dtype=torch.float64):
    options = {"device": "cpu", "dtype": dtype, "requires_grad": False, "training": True}
    return info.module_inputs_func(info, **options)


def build(info, one, dtype=torch.float64):
    given = one.constructor_input
    return info.module_cls(*given.args, **given.kwargs).to(dtype)


def call(module, one):
    torch.manual_seed(0)
    given = copy.deepcopy(one.forward_input)
    return module(*given.args, **given.kwargs)


def tensors(result):
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, tuple | list):
        return [tensor for part in result for tensor in tensors(part)]
    return []


def with_matrices():
    found = []
    for info in common_modules.module_db:
        first = next(iter(inputs(info)), None)
        if first is not None and list(matrices(build(info, first))):
            found.append(pytest.param(info, id=info.name.replace(".", "-")))
    return found


@pytest.mark.parametrize("info", with_matrices())
def test_a_constrained_module_computes_what_a_plain_one_does(info):
    for one in inputs(info)[:3]:
        module = build(info, one)
        for layer, name in [*matrices(module)]:
            cwy.orthogonal(layer, name)
        constrained = tensors(call(module, one))
        sum(out.abs().sum() for out in constrained).backward()
        for name, parameter in module.named_parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all(), name
        evaluated = tensors(call(module.eval(), one))

        cwy.bake(module)
        assert not any(
            isinstance(part, cwy.parametrizations.OrthogonalMap) for part in module.modules()
        )
        torch.testing.assert_close(tensors(call(module, one)), evaluated)
        torch.testing.assert_close(tensors(call(module.train(), one)), constrained)
