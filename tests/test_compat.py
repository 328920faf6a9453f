"""Code written for torch's own ``orthogonal`` runs on this library, and other names for its methods
are understood.
"""

import copy
import sys
import types
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import cwy
from cwy.parametrizations import OrthogonalMap
from tests.helpers.methods import Layer

SHAPES = [(6, 6), (9, 4), (4, 9), (2, 6, 6), (3, 2, 5), (1, 1), (8, 4, 3, 3)]
MAPS = [None, "matrix_exp", "cayley", "householder"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("trivialized", [True, False])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_weight_starts_where_torch_would_start_it(shape, name, trivialized, dtype):
    ours = Layer(shape, dtype)
    theirs = copy.deepcopy(ours)
    options = {"name": "weight", "orthogonal_map": name, "use_trivialization": trivialized}
    if dtype.is_complex and name == "householder":
        with pytest.raises(ValueError, match="householder"):
            cwy.compat.orthogonal(ours, **options)
        return
    torch.manual_seed(1)
    parametrizations.orthogonal(theirs, **options)
    torch.manual_seed(1)
    assert cwy.compat.orthogonal(ours, **options) is ours
    torch.testing.assert_close(ours.weight, theirs.weight, atol=1e-10, rtol=0)

    optimizer = torch.optim.Adam(ours.parameters(), lr=0.1)
    ours.weight.real.square().sum().backward()
    optimizer.step()
    # Kernels of convolutions are batches of matrices, as in torch.
    assert cwy.orthogonality_error(ours.weight) <= 1e-12


@pytest.mark.parametrize(
    ("name", "trivialized", "method"),
    [
        (None, True, "cwy"),
        ("householder", True, "cwy"),
        ("cayley", True, "scornn"),
        ("matrix_exp", True, "dtriv"),
        ("matrix_exp", False, "exprnn"),
    ],
)
def test_torchs_maps_are_translated(name, trivialized, method):
    layer = cwy.compat.orthogonal(nn.Linear(4, 4), "weight", name, use_trivialization=trivialized)
    assert type(layer.parametrizations.weight[0]) is cwy.METHODS[method].build


def test_half_precision_and_meta_weights():
    half = cwy.compat.orthogonal(nn.Linear(6, 4, dtype=torch.bfloat16))
    assert half.weight.dtype == torch.bfloat16
    assert cwy.orthogonality_error(half.weight) <= 2e-2
    assert cwy.compat.orthogonal(nn.Linear(6, 6, device="meta")).weight.is_meta


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["weight", "cwy"], "cwy.orthogonal"),
        (["wait"], "wait"),
        (["bias"], "must be a matrix"),
    ],
)
def test_mistakes_are_refused(arguments, message):
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=message):
        cwy.compat.orthogonal(layer, *arguments)
    assert not parametrize.is_parametrized(layer)


def test_a_foreign_module_runs_on_cwy_only_inside_the_context():
    theirs = parametrizations.orthogonal
    foreign = types.ModuleType("foreign")
    foreign.spectral = theirs
    sys.modules["foreign"] = foreign
    try:
        with suppress(ZeroDivisionError), cwy.compat.patch_torch():
            late = types.ModuleType("late")
            late.orthogonal = parametrizations.orthogonal
            sys.modules["late"] = late
            for call in (
                foreign.spectral,
                late.orthogonal,
                torch.nn.utils.parametrizations.orthogonal,
            ):
                layer = call(nn.Linear(6, 4), orthogonal_map="householder")
                assert isinstance(layer.parametrizations.weight[0], OrthogonalMap)
            with cwy.compat.patch_torch():
                pass
            assert isinstance(
                foreign.spectral(nn.Linear(4, 4)).parametrizations.weight[0], OrthogonalMap
            )
            _ = 1 / 0
        assert foreign.spectral is late.orthogonal is parametrizations.orthogonal is theirs
        assert cwy.compat.orthogonal is not theirs
        assert not isinstance(
            foreign.spectral(nn.Linear(4, 4)).parametrizations.weight[0], OrthogonalMap
        )
    finally:
        del sys.modules["foreign"]
        sys.modules.pop("late", None)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("cayley", "scornn"),
        ("matrix_exp", "exprnn"),
        ("expm", "exprnn"),
        ("householder", "hr"),
        ("Cayley", "scornn"),
    ],
)
def test_other_libraries_names_of_a_method_name_ours(name, method):
    with pytest.raises(ValueError, match=f"Did you mean '{method}'"):
        cwy.orthogonal(nn.Linear(4, 4), method=name)


@pytest.mark.parametrize("option", ["use_trivialization", "orthogonal_map", "triv"])
def test_other_libraries_options_name_ours(option):
    with pytest.raises(TypeError, match=r"method"):
        cwy.orthogonal(nn.Linear(4, 4), **{option: True})
    with pytest.raises(TypeError, match=r"exprnn|compat"):
        cwy.orthogonal(nn.Linear(4, 4), **{option: True})
