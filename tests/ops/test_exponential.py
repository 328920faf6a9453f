"""The exponential that waits for nothing, against the spectral definition in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cwy
from cwy.ops.skew import matrix_exp
from cwy.ops.skew.capturable import exponential
from cwy.ops.skew.frechet import exponential_and_slope


def skew(*shape):
    x = torch.randn(*shape, dtype=torch.float64)
    return x - x.mT


def spectral(a):
    values, vectors = torch.linalg.eigh(-1j * a)
    return ((vectors * torch.exp(1j * values).unsqueeze(-2)) @ vectors.mH).real


@given(
    st.integers(1, 40),
    st.sampled_from([0, 1e-30, 1e-9, 1e-3, 0.3, 1, 3, 30, 300]),
    st.integers(0, 9),
)
def test_it_is_the_exponential(n, size, seed):
    torch.manual_seed(seed)
    a = skew(2, n, n) * size / n**0.5
    norm = max(1.0, a.abs().sum(-2).max().item())
    for dtype in (torch.float64, torch.float32):
        given = a.to(dtype)
        truth, eps = spectral(given.double()), torch.finfo(dtype).eps
        assert (exponential(given) - truth).abs().max() <= 20 * eps * norm


def test_it_is_so_for_matrices_that_are_not_normal_and_has_an_end():
    a = torch.tensor([[0.0, 1e3], [0.0, 0.0]])
    assert torch.equal(exponential(a), torch.eye(2) + a)
    batch = torch.stack(
        [torch.zeros(3, 3), torch.full((3, 3), 1e6), torch.full((3, 3), float("nan"))]
    )
    zero, huge, nan = exponential(batch)
    assert torch.equal(zero, torch.eye(3))
    assert huge.isnan().all()
    assert nan.isnan().all()
    flat = torch.zeros(2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(exponential, flat)
    assert exponential(torch.zeros(0, 4, 4)).shape == (0, 4, 4)
    assert exponential(torch.zeros(2, 0, 0)).shape == (2, 0, 0)


def test_the_derivative_is_the_same_without_waiting():
    a = skew(3, 5, 5) * torch.tensor([1e-3, 1, 20], dtype=torch.float64)[:, None, None]
    slope = torch.randn_like(a)
    ours, plain = (
        exponential_and_slope(a, slope, tolerance=1e-17, waiting=waiting)
        for waiting in (False, True)
    )
    truth = torch.func.jvp(torch.linalg.matrix_exp, (a,), (slope,))
    for value, derivative in ((ours.value, ours.slope), (plain.value, plain.slope)):
        torch.testing.assert_close(value, truth[0], atol=1e-12, rtol=0)
        torch.testing.assert_close(derivative, truth[1], atol=1e-12, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 7, 190, 512])
def test_a_graph_holds_it_with_its_gradient(n):
    torch.manual_seed(0)
    chart = cwy.parametrizations.METHODS["exprnn"].build(n, device="cuda")
    x = chart.sample().requires_grad_()
    g = torch.randn(n, n, device="cuda")

    def step():
        (gradient,) = torch.autograd.grad((chart(x) * g).sum(), x)
        return chart(x).detach(), gradient

    plain = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = step()
    graph.replay()
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5 * other.abs().max().item(), rtol=0)
    double = x.detach().double().cpu().requires_grad_()
    q = torch.linalg.matrix_exp(double.triu(1) - double.triu(1).mT)
    (truth,) = torch.autograd.grad((q * g.double().cpu()).sum(), double)
    assert (ours[0].cpu() - q).abs().max() <= 1e-5
    assert (ours[1].cpu() - truth).norm() <= 1e-5 * max(1, truth.norm())
    assert torch.equal(matrix_exp(torch.zeros(3, 3, device="cuda")).cpu(), torch.eye(3))
