"""Calls that are planned by their signature: the same numbers as the first call."""

import pytest
import torch

from cwy.ops import cwy_matrix, dispatch, tcwy_matrix
from cwy.ops.wy.wy import matrix_and_pull_back

SHAPES = [(6, 4), (6, 6), (3, 6, 6), (2, 2, 7, 5), (40, 40), (300, 300), (520, 64)]
CPU_SHAPES = SHAPES[:4]
DEVICES = [
    *[("cpu", torch.float64, shape) for shape in CPU_SHAPES],
    *[pytest.param("cuda", torch.float32, shape, marks=pytest.mark.gpu) for shape in SHAPES],
]


def vectors(device, dtype, shape, truncated):
    torch.manual_seed(0)
    v = torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)
    rows = shape[:-1]
    if truncated:
        rows = (*shape[:-2], shape[-1])
    signs = torch.ones(rows, device=device, dtype=dtype)
    signs[..., 1] = -1
    return v, signs


def function(truncated):
    if truncated:
        return tcwy_matrix
    return cwy_matrix


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize(("device", "dtype", "shape"), DEVICES)
def test_a_pull_back_is_the_backward_pass(device, dtype, shape, truncated):
    v, signs = vectors(device, dtype, shape, truncated)
    right = function(truncated)(v.double(), signs=signs.double(), backend="composite")
    z = torch.randn_like(right)
    (slope,) = torch.autograd.grad(right, v, z)
    tolerance = {"rtol": 1e-3, "atol": 1e-3}
    if dtype == torch.float64:
        tolerance = {"rtol": 1e-9, "atol": 1e-9}
    for _ in range(2):
        matrix, pull_back = matrix_and_pull_back(v, signs, truncated=truncated)
        assert not matrix.requires_grad
        torch.testing.assert_close(matrix, right.to(dtype), **tolerance)
        for _ in range(2):
            torch.testing.assert_close(pull_back(z.to(dtype)), slope, **tolerance)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize(("device", "dtype", "shape"), DEVICES)
def test_later_calls_equal_the_first(device, dtype, shape, truncated, signed):
    v, signs = vectors(device, dtype, shape, truncated)
    if not signed:
        signs = None
    call = function(truncated)
    dispatch.forget_plans()
    z = None
    found = []
    for _ in range(3):
        q = call(v, signs=signs)
        if z is None:
            z = torch.randn_like(q)
        found.append((q.detach(), *torch.autograd.grad(q, v, z)))
    with torch.no_grad():
        torch.testing.assert_close(call(v, signs=signs), found[0][0])
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_only_plain_tensors_have_a_pull_back():
    v, signs = vectors("cpu", torch.float64, (6, 4), False)
    assert matrix_and_pull_back(v.half(), signs.half()) is None
    with torch.autograd.forward_ad.dual_level():
        assert matrix_and_pull_back(v, signs) is None
    with pytest.raises(ValueError, match="cwy_matrix"):
        matrix_and_pull_back(v, 2 * signs)


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr(dispatch, "_MOST_PLANNED", 2)
    dispatch.forget_plans()
    for number in range(5):
        dispatch.keep_plan(("a test", number), len)
        assert dispatch.planned(("a test", number)) is len
    assert len(dispatch._PLANNED) <= 2
    dispatch.forget_plans()
    assert dispatch.planned(("a test", 4)) is None
