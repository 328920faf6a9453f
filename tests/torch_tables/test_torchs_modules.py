"""Every module of torch's own table: each of its matrices can be constrained, and the module then
computes the same.
"""

import pytest
import torch
from torch import nn

import cwy
from tests.helpers.torch_tables import build, call, common_modules, inputs, tensors

pytestmark = pytest.mark.filterwarnings("ignore")
LAZY = nn.parameter.UninitializedParameter


def matrices(module):
    """Yield each submodule with the name of a matrix that is its own."""
    for layer in module.modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if not isinstance(parameter, LAZY) and parameter.dim() > 1:
                yield layer, name


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
