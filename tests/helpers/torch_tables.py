"""torch's own tables of modules and ops, with their inputs."""

import copy

import pytest
import torch

# torch's tables are private: they may change between versions, and what is missing is skipped.
common_modules = pytest.importorskip("torch.testing._internal.common_modules")
opinfo = pytest.importorskip("torch.testing._internal.opinfo.core")
# Importing them freezes torch's flags, which other tests set.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True


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
