"""Metrics, tangent vectors and retractions of the Stiefel manifold, against the paper's N x N
formulas.
"""

import itertools

import pytest
import torch

import cwy
from cwy.manifolds import reference, stiefel
from tests.helpers.largest import Largest

SHAPES = [(12, 3), (7, 5), (6, 6), (2, 9, 4), (2, 3, 5, 5), (5, 1), (1, 1)]
every_step = pytest.mark.parametrize(
    ("metric", "retraction"),
    list(itertools.product(stiefel.METRICS, stiefel.RETRACTIONS)),
    ids="-".join,
)


def point(shape, dtype=torch.float64):
    return torch.linalg.qr(torch.randn(shape, dtype=dtype)).Q


def step(x, g, lr, metric, retraction):
    return stiefel.RETRACTIONS[retraction](x, stiefel.gradient(x, g, metric), -lr)


@every_step
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_formulas(shape, dtype, metric, retraction):
    x, g = point(shape, dtype), torch.randn(shape, dtype=dtype)
    for lr in (0, 1e-6, 1e-2, 1, 100):
        expected = reference.step(x, g, lr, metric, retraction)
        torch.testing.assert_close(step(x, g, lr, metric, retraction), expected, atol=1e-10, rtol=0)


@every_step
def test_float32_is_as_exact_as_the_dense_formula(metric, retraction):
    x, g = point((40, 8)), torch.randn(40, 8, dtype=torch.float64)
    truth, low = (
        reference.step(x, g, 0.1, metric, retraction),
        (x.float(), g.float(), 0.1, metric, retraction),
    )
    cwy.testing.assert_as_close(step(*low), plain=reference.step(*low), truth=truth, factor=3)


@pytest.mark.parametrize("metric", stiefel.METRICS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradient_is_tangent_and_stands_for_the_derivative(shape, dtype, metric):
    x, g, other = (
        point(shape, dtype),
        torch.randn(shape, dtype=dtype),
        torch.randn(shape, dtype=dtype),
    )
    z, t = stiefel.gradient(x, g, metric).at(x), stiefel.project(x, other).at(x)
    torch.testing.assert_close(x.mH @ z, -(x.mH @ z).mH, atol=1e-12, rtol=0)
    torch.testing.assert_close(z, reference.generator(x, g, metric) @ x, atol=1e-12, rtol=0)
    torch.testing.assert_close(stiefel.inner(x, z, t, metric), (g.conj() * t).real.sum((-2, -1)))
    torch.testing.assert_close(stiefel.project(x, t).at(x), t, atol=1e-12, rtol=0)


HARD = {
    "gaussian": lambda x: torch.randn_like(x),
    "rank 1": lambda x: torch.randn_like(x[..., :1]) @ torch.randn_like(x[..., :1, :]),
    "rank 1, inside": lambda x: (
        x @ torch.randn_like(x[..., :1, :]).mT @ torch.randn_like(x[..., :1, :])
    ),
    "symmetric": lambda x: x @ (x.mT @ x + torch.ones(x.shape[-1], x.shape[-1])),
    "two scales": lambda x: torch.randn_like(x) * 1e-6 + torch.randn_like(x[..., :1]),
    "zero": torch.zeros_like,
}


@every_step
@pytest.mark.parametrize("family", HARD)
def test_any_step_ends_on_the_manifold(family, metric, retraction):
    """Whatever the gradient's size, in float32, and from wherever earlier steps led."""
    for shape in [(12, 3), (9, 8), (33, 33), (64, 16)]:
        x = point((7, *shape), torch.float32)
        sizes = 10.0 ** torch.tensor([-40, -20, -4, 0, 4, 12, 36]).reshape(-1, 1, 1)
        for _ in range(10):
            x = step(x, HARD[family](x) * sizes, 0.3, metric, retraction)
            assert cwy.orthogonality_error(x) <= 5e-6


@pytest.mark.parametrize("retraction", stiefel.RETRACTIONS)
def test_a_small_step_is_not_lost_in_rounding(retraction):
    x, g = point((50, 10), torch.float32), torch.randn(50, 10)
    z = stiefel.gradient(x, g)
    small = (step(x, g, 1e-6, "canonical", retraction) - x) / -1e-6
    assert (small - z.at(x)).abs().max() <= 0.1 * z.at(x).abs().max()


@every_step
def test_never_an_n_by_n_matrix(metric, retraction):
    x, g = point((3000, 4), torch.float32), torch.randn(3000, 4)
    with Largest() as seen:
        step(x, g, 0.1, metric, retraction)
    assert seen.largest == 3000 * 4


@every_step
def test_autocast_changes_nothing(metric, retraction):
    x, g = point((20, 6), torch.float32), torch.randn(20, 6)
    plain = step(x, g, 0.1, metric, retraction)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(step(x, g, 0.1, metric, retraction), plain)


def test_polar_is_the_nearest_point():
    x = point((9, 4)) + 1e-2 * torch.randn(9, 4, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    torch.testing.assert_close(stiefel.polar(x), u @ vh, atol=1e-6, rtol=0)
    torch.testing.assert_close(stiefel.polar(stiefel.polar(x)), u @ vh, atol=1e-14, rtol=0)


def test_an_unknown_metric_is_named():
    x = point((3, 2))
    for call in (
        lambda: stiefel.gradient(x, x, "riemann"),
        lambda: stiefel.inner(x, x, x, "riemann"),
    ):
        with pytest.raises(ValueError, match="'canonical', 'euclidean', got 'riemann'"):
            call()


def test_wide_points_and_other_shapes_are_refused():
    for x, z in ((torch.eye(2, 3), torch.eye(2, 3)), (torch.eye(3, 2), torch.eye(3))):
        with pytest.raises(ValueError, match=r"N >= M, got \(\d, \d\) and \(\d, \d\)"):
            stiefel.gradient(x, z)
