"""Orthogonality and accuracy of the compact WY transform, on vectors that are hard on it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cwy.ops import cwy_matrix, cwy_multiply, householder_vectors, tcwy_matrix, wy_factors
from cwy.testing import orthogonality_error
from tests.helpers.families import FAMILIES, departure, vectors

sizes = st.integers(1, 48)


@given(
    st.sampled_from(FAMILIES),
    sizes,
    sizes,
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 9),
)
def test_orthogonal_for_every_family(family, n, size, dtype, seed):
    v = vectors(family, n, size, dtype, seed)
    bound = 20 * torch.finfo(dtype).eps * max(n, size)
    assert departure(cwy_matrix(v)) <= bound
    if size <= n:
        assert departure(tcwy_matrix(v)) <= bound


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_orthogonal_at_sizes_that_are_hard(family, dtype):
    """Few rows and many vectors, and sizes around that of a block, with many seeds."""
    for n, size in ((1, 48), (2, 48), (3, 44), (6, 48), (48, 48), (63, 63), (65, 65), (64, 5)):
        bound = 20 * torch.finfo(dtype).eps * max(n, size)
        if size > 8 * n:
            bound *= 2
        for seed in range(10):
            v = vectors(family, n, size, torch.float64, seed).to(dtype)
            assert departure(cwy_matrix(v)) <= bound, (n, size, seed)
            if size <= n:
                assert departure(tcwy_matrix(v)) <= bound, (n, size, seed)


@given(st.sampled_from(FAMILIES), sizes, sizes, st.sampled_from([torch.float32, torch.float64]))
def test_the_inverse_of_s_is_bounded(family, n, size, dtype):
    # A theorem: a column of T is at most 4 in each entry, and one of U T has norm 2. Zero vectors
    # have neither.
    u, t = wy_factors(vectors(family, n, size, dtype))
    live = u.norm(dim=0) > 0
    norms = (u @ t).norm(dim=0)[live]
    assert t.abs().max() <= 4.0004
    assert (norms - 2).abs().max() <= 1e-4 if live.any() else True


on_gpu = pytest.mark.gpu


@pytest.mark.parametrize(
    ("n", "device"),
    [
        (64, "cpu"),
        (1024, "cpu"),
        pytest.param(1024, "cuda", marks=on_gpu),
        pytest.param(4096, "cuda", marks=on_gpu),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gaussian_vectors(n, device, dtype):
    assert (
        departure(cwy_matrix(vectors("gaussian", n, n, dtype, device=device)))
        <= 8 * torch.finfo(dtype).eps * n**0.5
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("n", "size", "device"),
    [(1024, 1024, "cpu")]
    + [
        pytest.param(n, k, "cuda", marks=on_gpu)
        for n in (200, 1024, 4096)
        for k in (60, 257, 1024, n)
    ],
)
def test_hard_vectors_at_large_sizes(family, n, size, device):
    v = vectors(family, n, size, torch.float32, device=device).requires_grad_()
    q = cwy_matrix(v)
    assert departure(q) <= 20 * torch.finfo(torch.float32).eps * max(n, size)
    (q * q.detach().flip(0)).sum().backward()
    assert v.grad.isfinite().all()


@given(
    st.sampled_from(FAMILIES), st.integers(1, 33), st.integers(1, 33), st.booleans(), st.booleans()
)
def test_equals_one_reflection_at_a_time(family, n, size, is_complex, batched):
    v = vectors(family, n, size)
    if is_complex:
        v = torch.complex(v, vectors(family, n, size, seed=1))
    if batched:
        v = torch.stack([v, v.flip(-1)])
    x = torch.randn(*v.shape[:-2], 3, n, dtype=v.dtype)
    for call in (cwy_matrix, *([tcwy_matrix] if size <= n else [])):
        torch.testing.assert_close(call(v), call(v, backend="reference"), atol=1e-12, rtol=0)
    for adjoint in (False, True):
        y = cwy_multiply(v, x, adjoint)
        torch.testing.assert_close(
            y, cwy_multiply(v, x, adjoint, backend="reference"), atol=1e-12 * n, rtol=0
        )
        torch.testing.assert_close(
            y, cwy_multiply(wy_factors(v), x, adjoint), atol=1e-12 * n, rtol=0
        )


@pytest.mark.parametrize("backend", ["analytic", "composite", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.bfloat16])
def test_signs_multiply_the_columns(backend, dtype):
    v = torch.randn(2, 7, 3, dtype=dtype)
    phases = torch.sgn(torch.randn(2, 7, dtype=dtype)).requires_grad_()
    for form, signs in ((cwy_matrix, phases), (tcwy_matrix, phases[:, :3])):
        q = form(v, signs=signs, backend=backend)
        assert q.dtype == dtype
        torch.testing.assert_close(q, form(v, backend=backend) * signs.unsqueeze(-2))
        assert torch.autograd.grad(q.abs().sum() + q.real.sum(), phases)[0].abs().sum() > 0


@pytest.mark.parametrize(("n", "size"), [(1, 1), (7, 3), (33, 33), (64, 17)])
def test_equals_lapack(n, size):
    v = torch.randn(n, size, dtype=torch.float64).tril(-1) + torch.eye(n, size, dtype=torch.float64)
    tau = 2 / v.square().sum(0)
    x = torch.randn(n, 5, dtype=torch.float64)
    torch.testing.assert_close(
        tcwy_matrix(v), torch.linalg.householder_product(v, tau), atol=1e-13, rtol=0
    )
    torch.testing.assert_close(cwy_multiply(v, x.mT).mT, torch.ormqr(v, tau, x), atol=1e-13, rtol=0)


def test_scaling_a_vector_changes_nothing():
    v = vectors("gaussian", 33, 17, torch.float32)
    powers = 2.0 ** torch.randint(-60, 60, (17,))
    assert torch.equal(cwy_matrix(v * powers), cwy_matrix(v))
    for scale in (1e-30, 1e30):
        torch.testing.assert_close(cwy_matrix(v * scale), cwy_matrix(v), atol=1e-6, rtol=0)
    assert cwy_matrix(torch.full((3, 2), 1e-42)).isfinite().all()


def test_zero_vectors_are_no_reflections():
    v = torch.randn(9, 6, dtype=torch.float64)
    v[:, [1, 4]] = 0
    v.requires_grad_()
    q = cwy_matrix(v)
    torch.testing.assert_close(q, cwy_matrix(v[:, [0, 2, 3, 5]]), atol=1e-14, rtol=0)
    assert torch.equal(cwy_matrix(torch.zeros(4, 3)), torch.eye(4))
    (q * torch.randn_like(q)).sum().backward()
    assert v.grad.isfinite().all()


def shortened(v, size):
    """With columns 1 and 3 of this length."""
    scale = torch.ones(v.shape[-1], dtype=v.real.dtype, device=v.device)
    scale[[1, 3]] = size
    return (v / torch.linalg.vector_norm(v, dim=-2, keepdim=True) * scale).requires_grad_()


def gradients_of_short_vectors(form, v):
    """Assert that vectors too short for their gradient have a finite one: that of the shortest
    vector that has its own.
    """
    finfo = torch.finfo(v.dtype)

    def gradient(size, z):
        short = shortened(v, size)
        return torch.autograd.grad(form(short), short, z)[0]

    z = torch.randn_like(form(v))
    wanted = gradient(finfo.tiny * 2.0**16, z)
    for size in (finfo.tiny, finfo.tiny / 2**8):
        # Denormal numbers have a coarse direction.
        torch.testing.assert_close(
            gradient(size, z), wanted, atol=0.02 * wanted.abs().max().item(), rtol=0
        )
    for size in (finfo.tiny, finfo.tiny / 2**8, finfo.tiny * finfo.eps * 3):
        assert gradient(size, z).isfinite().all()
        assert not gradient(size, torch.zeros_like(z)).any()


@pytest.mark.parametrize("backend", ["analytic", "composite", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_gradients_of_denormal_vectors_are_finite(backend, dtype):
    """Weight decay takes vectors without a gradient there."""
    v, x = torch.randn(9, 5, dtype=dtype), torch.randn(3, 9, dtype=dtype)
    gradients_of_short_vectors(lambda v: cwy_matrix(v, backend=backend), v)
    gradients_of_short_vectors(lambda v: tcwy_matrix(v, backend=backend), v)
    gradients_of_short_vectors(lambda v: cwy_multiply(v, x, backend=backend), v)
    gradients_of_short_vectors(lambda v: wy_factors(v, backend=backend).t, v)


@given(st.integers(1, 12), st.integers(0, 12), st.integers(0, 3))
def test_determinant(n, size, zeros):
    v = torch.randn(n, size, dtype=torch.float64)
    v[:, :zeros] = 0
    live = max(size - zeros, 0)
    assert torch.linalg.det(cwy_matrix(v)).item() == pytest.approx((-1) ** live, abs=1e-10)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_half_precision_is_rounded_once(dtype, bound):
    v = torch.randn(96, 96).to(dtype)
    q = cwy_matrix(v)
    assert q.dtype == dtype
    assert orthogonality_error(q) <= bound
    assert torch.equal(q, cwy_matrix(v.float()).to(dtype))
    singular = torch.linalg.svdvals(cwy_matrix(v.float()).double())
    assert (singular - 1).abs().max() <= 2e-5
    assert cwy_multiply(v, torch.ones(2, 96, dtype=dtype)).dtype == dtype


def test_empty_batches_and_no_reflections():
    assert cwy_matrix(torch.empty(0, 4, 2)).shape == (0, 4, 4)
    assert torch.equal(cwy_matrix(torch.empty(3, 0)), torch.eye(3))
    assert cwy_multiply(torch.randn(4, 2), torch.empty(0, 4)).shape == (0, 4)
    assert cwy_multiply(torch.empty(0, 4, 2), torch.empty(0, 5, 4)).shape == (0, 5, 4)
    for count in (2, 4):
        assert householder_vectors(torch.empty(0, 4, 4), count)[0].shape == (0, 4, count)


def test_float32_gradients_are_those_of_float64():
    x = torch.randn(5, 64)
    multiply = lambda v: cwy_multiply(v, x.to(v.dtype))
    for family, bound in (("gaussian", 1e-5), ("parallel", 5e-4), ("nearly parallel", 5e-4)):
        for call, shape in (
            (cwy_matrix, (64, 64)),
            (cwy_matrix, (64, 20)),
            (tcwy_matrix, (64, 20)),
            (multiply, (64, 20)),
        ):
            v = vectors(family, *shape, torch.float32).requires_grad_()
            z = torch.randn_like(call(v))
            (g,) = torch.autograd.grad(call(v), v, z)
            w = v.detach().double().requires_grad_()
            (truth,) = torch.autograd.grad(call(w), w, z.double())
            assert (g - truth).norm() <= bound * truth.norm()
            # The gradient is across the vectors: weight decay and steps change their norms alone.
            along = (v * g).sum(0).abs() / (v.norm(dim=0) * g.norm(dim=0))
            assert along.max() <= 1e-5
