"""The verified step on the orthogonal group, compared with the general retraction."""

import pytest
import torch

import cwy
from cwy.manifolds import _orthogonal_group as orthogonal_group
from cwy.manifolds import reference, stiefel

every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128], ids=str
)


def point(size, dtype):
    return torch.linalg.qr(torch.randn(size, size, dtype=dtype)).Q.contiguous()


def step(x, g, lr):
    """Take the canonical step, or None."""
    skew = orthogonal_group.skew_product(x, g)
    return orthogonal_group.verified_cayley(x, skew, -lr)


@every_dtype
@pytest.mark.parametrize("size", [1, 2, 5, 24, 65])
@pytest.mark.parametrize("lr", [0.0, 1e-6, 1e-4, 1e-2, 0.3, 2.0])
def test_equals_the_general_retraction(size, lr, dtype):
    """Short steps are a series and long ones a solve. Neither is further off than rounding."""
    x, g = point(size, dtype), torch.randn(size, size, dtype=dtype)
    moved = step(x, g, lr)
    eps = torch.finfo(dtype).eps
    general = stiefel.cayley(x, stiefel.gradient(x, g), -lr)
    torch.testing.assert_close(moved, general, atol=40 * eps * (1 + lr * size), rtol=0)
    assert cwy.orthogonality_error(moved) <= 8 * eps


@pytest.mark.parametrize("lr", [1e-4, 9e-4, 3e-3, 0.1])
def test_float32_is_as_exact_as_the_dense_formula(lr):
    """Also just below and above the length at which a solve replaces the series."""
    x, g = point(24, torch.float64), torch.randn(24, 24, dtype=torch.float64)
    truth = reference.step(x, g, lr)
    low = (x.float(), g.float(), lr)
    cwy.testing.assert_as_close(step(*low), plain=reference.step(*low), truth=truth, factor=2)


def test_a_small_step_is_not_lost_in_rounding():
    x, g = point(24, torch.float32), torch.randn(24, 24)
    tangent = stiefel.gradient(x, g).at(x)
    moved = (step(x, g, 1e-6) - x) / -1e-6
    assert (moved - tangent).abs().max() <= 0.1 * tangent.abs().max()


@every_dtype
@pytest.mark.parametrize("lr", [1e-4, 0.3])
def test_refuses_a_point_off_the_group_however_long_the_step(lr, dtype):
    """The Frobenius norm of the error may not exceed the root of eps, wherever the error is."""
    tolerance = torch.finfo(dtype).eps ** 0.5
    x, g = point(24, dtype), torch.randn(24, 24, dtype=dtype)
    assert step(x, g, lr) is not None
    stretched, doubled, collapsed = x.clone(), x * 2, x.clone()
    stretched[:, 0] *= 1 + tolerance
    collapsed[:, 0] = x[:, 1]
    for off in (stretched, doubled, collapsed, torch.zeros_like(x), x * torch.nan):
        assert step(off, g, lr) is None
    nearly = x.clone()
    nearly[:, 0] *= 1 + tolerance / 3
    assert cwy.orthogonality_error(step(nearly, g, lr)) <= 8 * torch.finfo(dtype).eps


@every_dtype
@pytest.mark.parametrize("x", ["haar", "identity"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("lr", [0.0, 1e-2])
def test_refuses_one_entry_that_is_not_finite(lr, value, x, dtype):
    x = {"haar": point(5, dtype), "identity": torch.eye(5, dtype=dtype)}[x]
    for row in range(5):
        for column in range(5):
            g = torch.zeros(5, 5, dtype=dtype)
            g[row, column] = value
            assert step(x, g, lr) is None


def test_refuses_a_step_that_the_general_retraction_shortens():
    x, g = point(24, torch.float32), torch.randn(24, 24)
    length = torch.linalg.vector_norm(orthogonal_group.skew_product(x, g)).item()
    longest = stiefel.longest_step(torch.float32)
    assert step(x, g, 0.99 * longest / length) is not None
    assert step(x, g, 1.01 * longest / length) is None
    assert step(x, g * 1e30, 1e-2) is None
    assert step(x, g * 1e20, 1e-25) is None
    assert step(x, torch.zeros_like(x), 1e39) is None
