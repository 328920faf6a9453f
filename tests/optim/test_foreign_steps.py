"""Weights on the manifold under an optimizer that does not know it: one warning per weight, and
none otherwise.
"""

import copy
import gc
import io
import pickle
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import cwy
from cwy.optim import StiefelSGD, for_model


def make(method="rgd-c-c"):
    return nn.Sequential(cwy.orthogonal(nn.Linear(4, 4), method=method))


def steps(model, optimizer, count=3):
    """The warnings of some steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
    return [str(w.message) for w in caught if "cwy.optim.for_model" in str(w.message)]


def assigned():
    model = make()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


def from_meta():
    with torch.device("meta"):
        model = make()
    model.to_empty(device="cpu").load_state_dict(make().state_dict())
    return model


def saved():
    file = io.BytesIO()
    torch.save(make(), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


MODELS = {
    "made": make,
    "adam": lambda: make("rgd-adam"),
    "deepcopied": lambda: copy.deepcopy(make()),
    "copied from a copy": lambda: copy.deepcopy(copy.deepcopy(make())),
    "pickled": lambda: pickle.loads(pickle.dumps(make())),
    "saved": saved,
    "assigned": assigned,
    "from meta": from_meta,
}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("model", MODELS)
def test_another_optimizer_warns_once(model, kind):
    model = MODELS[model]()
    (message,) = steps(model, kind(model.parameters(), lr=1e-2))
    assert kind.__name__ in message
    assert "(4, 4)" in message
    assert steps(model, kind(model.parameters(), lr=1e-2)) == []


@pytest.mark.parametrize("model", MODELS)
def test_our_optimizers_do_not_warn(model):
    model = MODELS[model]()
    assert steps(model, for_model(model, lr=1e-2)) == []
    alone = StiefelSGD([model[0].weight], lr=1e-2)
    assert steps(model, alone) == []


def test_only_weights_that_are_stepped_warn():
    model = make()
    assert steps(model, torch.optim.SGD([model[0].bias], lr=1e-2)) == []
    frozen = make()
    frozen[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(frozen.parameters(), lr=1e-2)
    assert steps(frozen, optimizer) == []
    frozen[0].weight.requires_grad_(True)
    assert len(steps(frozen, optimizer)) == 1
    baked = cwy.bake(make())
    assert steps(baked, torch.optim.SGD(baked.parameters(), lr=1e-2)) == []
    free_group = StiefelSGD([{"params": model.parameters(), "stiefel": False}], lr=1e-2)
    assert len(steps(model, free_group)) == 1


def test_a_weight_that_is_added_later_warns():
    model = make()
    optimizer = torch.optim.SGD([model[0].bias], lr=1e-2)
    assert steps(model, optimizer) == []
    optimizer.add_param_group({"params": [model[0].weight]})
    assert len(steps(model, optimizer)) == 1


def test_the_mark_keeps_no_module_alive():
    gc.disable()
    try:
        model = make()
        layer = weakref.ref(model[0])
        del model
        assert layer() is None
    finally:
        gc.enable()


def test_programs_without_such_weights_have_no_hook():
    code = """
import torch, cwy
from torch.optim import optimizer
cwy.orthogonal(torch.nn.Linear(3, 3))
assert not optimizer._global_optimizer_pre_hooks
cwy.orthogonal(torch.nn.Linear(3, 3), method="rgd")
cwy.orthogonal(torch.nn.Linear(3, 3), method="rgd")
assert len(optimizer._global_optimizer_pre_hooks) == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_average_is_brought_back_to_the_manifold():
    """Entries are averaged, so that the average of orthogonal weights is not orthogonal."""
    model = make()
    averaged = AveragedModel(model)
    optimizer = for_model(model, lr=0.5)
    for _ in range(3):
        steps(model, optimizer, 1)
        averaged.update_parameters(model)
    weight = averaged.module[0].weight
    assert cwy.orthogonality_error(weight) > 1e-3
    for_model(averaged.module, project=True)
    assert cwy.orthogonality_error(weight) < 1e-6
