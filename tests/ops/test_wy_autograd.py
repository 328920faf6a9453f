"""Derivatives of every order and mode: right, or an error; never silently zero."""

import pytest
import torch
import torch.autograd.forward_ad as fwad
from hypothesis import example, given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

from cwy.ops import cwy_matrix, cwy_multiply, householder_vectors, tcwy_matrix, wy_factors
from cwy.ops.wy import analytic, composite
from tests.helpers.largest import Largest

CALLS = {
    "wy_factors": lambda v, x: wy_factors(v),
    "cwy_matrix": lambda v, x: cwy_matrix(v),
    "tcwy_matrix": lambda v, x: tcwy_matrix(v),
    "cwy_multiply": lambda v, x: cwy_multiply(v, x),
    "cwy_multiply adjoint": lambda v, x: cwy_multiply(v, x, adjoint=True),
    "cwy_multiply factors": lambda v, x: cwy_multiply(wy_factors(v), x),
}


def inputs(n, size, dtype=torch.float64, batch=()):
    v = torch.randn(*batch, n, size, dtype=dtype, requires_grad=True)
    x = torch.randn(*batch, 2, n, dtype=dtype, requires_grad=True)
    return v, x


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("n", "size", "batch"), [(1, 1, ()), (4, 4, ()), (5, 2, (2,))])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradcheck(call, n, size, batch, dtype):
    args = inputs(n, size, dtype, batch)
    assert gradcheck(CALLS[call], args, check_forward_ad=True, check_batched_grad=True)
    if not batch:
        assert gradgradcheck(CALLS[call], args, check_fwd_over_rev=True)


def scalar(call):
    """A smooth function of the vectors whose second derivative is not zero."""
    weight = torch.linspace(-1, 1, 6, dtype=torch.float64)[:, None]
    x = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(2, 6)

    def f(v):
        y = CALLS[call](v, x)
        y = y.t if isinstance(y, tuple) else y
        return (y * y.sin()).sum() + (v * weight).sum()

    return f


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("size", [3, 6])
def test_transforms_against_finite_differences(call, size):
    f, v, h = scalar(call), torch.randn(6, size, dtype=torch.float64), 1e-4
    dv = torch.randn_like(v)
    slope = (f(v + h * dv) - f(v - h * dv)) / (2 * h)
    bend = (f(v + h * dv) - 2 * f(v) + f(v - h * dv)) / h**2
    with fwad.dual_level():
        dual = fwad.unpack_dual(f(fwad.make_dual(v, dv))).tangent
    for value in (jvp(f, (v,), (dv,))[1], (grad(f)(v) * dv).sum(), dual):
        assert value.item() == pytest.approx(slope.item(), rel=1e-5, abs=1e-6)
    for second in (hessian(f), jacrev(jacrev(f)), jacfwd(jacfwd(f)), jacrev(jacfwd(f))):
        curvature = torch.einsum("ij,ijkl,kl->", dv, second(v), dv)
        assert curvature.item() == pytest.approx(bend.item(), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("call", CALLS)
def test_vmap_equals_a_loop(call):
    f, v = scalar(call), torch.randn(4, 6, 5, dtype=torch.float64)
    torch.testing.assert_close(vmap(f)(v), torch.stack([f(one) for one in v]))
    torch.testing.assert_close(vmap(grad(f))(v), torch.stack([grad(f)(one) for one in v]))


@pytest.mark.parametrize("call", CALLS)
def test_transforms_inside_a_compiled_function(call):
    f, v, dv = (
        scalar(call),
        torch.randn(6, 3, dtype=torch.float64),
        torch.randn(6, 3, dtype=torch.float64),
    )
    compiled = torch.compile(
        lambda v, dv: jvp(f, (v,), (dv,))[1], fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(v, dv), jvp(f, (v,), (dv,))[1])


def test_a_forward_tangent_into_a_compiled_function_is_right_or_raises():
    f, v, dv = (
        scalar("cwy_matrix"),
        torch.randn(6, 3, dtype=torch.float64),
        torch.randn(6, 3, dtype=torch.float64),
    )
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    try:
        with fwad.dual_level():
            tangent = fwad.unpack_dual(compiled(fwad.make_dual(v, dv))).tangent
    except (RuntimeError, NotImplementedError):
        return
    torch.testing.assert_close(tangent, jvp(f, (v,), (dv,))[1])


odd_sizes = st.sampled_from([1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 300, 1000])
calls = st.sampled_from(["cwy_matrix", "tcwy_matrix", "cwy_multiply"])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@given(odd_sizes, odd_sizes, st.booleans(), st.booleans(), calls)
@example(300, 300, False, False, "cwy_matrix")
@example(300, 300, True, False, "cwy_matrix")
@example(1000, 300, False, False, "cwy_matrix")
@example(1000, 300, False, True, "tcwy_matrix")
def test_analytic_equals_composite(device, n, size, is_complex, strided, call):
    """The fast path against autograd of the definition: values and gradients, in poisoned memory,
    on strided input.
    """
    if is_complex:
        n, size = min(n, 300), min(size, 300)
    if call == "tcwy_matrix":
        size = min(n, size)
    like = {"dtype": torch.complex128 if is_complex else torch.float64, "device": device}
    base = torch.randn(size, n, **like).mT if strided else torch.randn(n, size, **like)
    x = torch.randn(n, 3, **like).mT
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        results = []
        for backend in (analytic, composite):
            v, xs = (
                base.clone(memory_format=torch.preserve_format).requires_grad_(),
                x.clone().requires_grad_(),
            )
            y = (
                backend.cwy_multiply(v, xs, False)
                if call == "cwy_multiply"
                else getattr(backend, call)(v)
            )
            angles = torch.arange(y.numel(), dtype=torch.float64, device=device).reshape(y.shape)
            weight = torch.polar(torch.ones_like(angles), angles) if is_complex else angles.cos()
            (y * weight).sum().real.backward()
            results.append((y.detach(), v.grad, *([xs.grad] if xs.grad is not None else [])))
    finally:
        torch.use_deterministic_algorithms(False)
    for fast, truth in zip(*results, strict=True):
        torch.testing.assert_close(fast, truth, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("size", [130, 260])
def test_a_batch_of_gradients_of_large_matrices(size):
    """Products are cut into halves there, written into parts of a result, for which ``vmap`` has no
    rule.
    """
    v = torch.randn(200, size, dtype=torch.float64, requires_grad=True)
    q, z = cwy_matrix(v), torch.randn(2, 200, 200, dtype=torch.float64)
    (batch,) = torch.autograd.grad(q, v, z, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(
        batch, torch.stack([torch.autograd.grad(q, v, one, retain_graph=True)[0] for one in z])
    )


def test_torchs_counter_knows_every_product_of_a_large_matrix():
    """As the README counts them, with at most half of each triangular product left out."""
    n = 512
    v = torch.randn(n, n, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        q = cwy_matrix(v)
    with FlopCounterMode(display=False) as backward:
        q.backward(torch.ones_like(q))
    assert 4 <= forward.get_total_flops() / n**3 <= 6 + 2 / 3
    assert 6 <= backward.get_total_flops() / n**3 <= 8


@pytest.mark.parametrize("backward", [False, True])
def test_no_object_of_n_by_n(backward):
    """T-CWY and multiplication never make a tensor larger than their arguments."""
    n, m = 700, 5
    v = torch.randn(n, m, requires_grad=True)
    x = torch.randn(3, n, requires_grad=True)
    with Largest() as seen:
        loss = tcwy_matrix(v).sum() + cwy_multiply(v, x).square().sum()
        if backward:
            loss.backward()
    assert seen.largest <= n * m


def test_the_inverse_map_has_no_derivative_and_says_so():
    q = torch.eye(4, requires_grad=True)
    for call in (
        lambda: householder_vectors(q),
        lambda: jvp(lambda q: householder_vectors(q)[0], (q.detach(),), (q.detach(),)),
        lambda: grad(lambda q: householder_vectors(q)[0].sum())(q.detach()),
    ):
        with pytest.raises(ValueError, match="no derivative"):
            call()
