"""From matrices back to reflection vectors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cwy.ops import cwy_matrix, householder_vectors, tcwy_matrix

DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]


def matrices(n, dtype):
    eye = torch.eye(n, dtype=dtype)
    gauss = torch.randn(n, n, dtype=dtype)
    yield "identity", eye
    yield "minus identity", -eye
    yield "permutation", eye[torch.randperm(n)]
    yield "cyclic shift", eye.roll(1, 0)
    yield "Haar", torch.linalg.qr(gauss).Q
    for size in (1e-2, 1e-4, 1e-7):
        yield f"identity + {size}", torch.linalg.matrix_exp(size * (gauss - gauss.mH))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 5, 33, 64])
def test_inverts_with_no_dead_column(n, dtype):
    for name, q in matrices(n, dtype):
        for m in {n, (n + 1) // 2}:
            v, signs = householder_vectors(q[:, :m])
            error = (tcwy_matrix(v) * signs - q[:, :m]).abs().max().item()
            assert error <= (5e-6 if v.dtype in (torch.float32, torch.complex64) else 1e-13), name
            assert v.norm(dim=0).min() > 0.9, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_identity_is_exact_and_alive(dtype):
    v, signs = householder_vectors(torch.eye(6, dtype=dtype))
    v.requires_grad_()
    q = cwy_matrix(v) * signs
    assert torch.equal(q, torch.eye(6, dtype=dtype))
    (q * torch.randn_like(q)).sum().abs().backward()
    assert (v.grad.norm(dim=0)[:-1] > 0).all()


def test_the_jacobian_at_the_identity_has_full_rank():
    # Every direction of so(N) is open: what a start at N copies of one vector would lose.
    n = 6
    v, signs = householder_vectors(torch.eye(n, dtype=torch.float64))
    jacobian = torch.func.jacrev(lambda v: cwy_matrix(v) * signs)(v).reshape(n * n, -1)
    assert torch.linalg.matrix_rank(jacobian) == n * (n - 1) // 2


@given(st.integers(1, 24), st.integers(1, 24), st.integers(0, 3), st.integers(0, 99))
def test_few_reflections(n, size, spare, seed):
    """Any L that can represent the matrix, its signs not known beforehand."""
    size = min(n, size)
    g = torch.Generator().manual_seed(seed)
    q = cwy_matrix(torch.randn(n, size, dtype=torch.float64, generator=g))
    count = min(n, size + spare)
    v, signs = householder_vectors(q, count)
    assert v.shape == (n, count)
    assert v.norm(dim=0).min() > 0.9
    torch.testing.assert_close(cwy_matrix(v) * signs, q, atol=1e-9, rtol=0)


@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_few_reflections_in_float32(size):
    # A small rotation of a few planes: the moved subspace must be told from rounding.
    q = torch.eye(40)
    q[:6, :6] = torch.linalg.matrix_exp(size * (lambda a: a - a.mT)(torch.randn(6, 6)))
    mix = torch.linalg.qr(torch.randn(40, 40)).Q
    q = mix @ q @ mix.mT
    for count in (6, 7, 8):
        v, signs = householder_vectors(q, count)
        assert (cwy_matrix(v) * signs - q).abs().max() <= 5e-6


def test_batches():
    q = torch.linalg.qr(torch.randn(2, 3, 7, 4)).Q
    v, signs = householder_vectors(q)
    assert v.shape == (2, 3, 7, 4)
    torch.testing.assert_close(tcwy_matrix(v) * signs.unsqueeze(-2), q, atol=5e-6, rtol=0)
    q = cwy_matrix(torch.randn(2, 3, 5, 2, dtype=torch.float64))
    v, signs = householder_vectors(q, 2)
    torch.testing.assert_close(cwy_matrix(v) * signs.unsqueeze(-2), q, atol=1e-12, rtol=0)
