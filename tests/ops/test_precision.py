"""Neither autocast nor a matmul precision touches orthogonality: eager or compiled, on any
device.
"""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cwy.ops import cwy_matrix, cwy_multiply, tcwy_matrix
from cwy.ops._precision import full_precision
from cwy.testing import orthogonality_error

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=["highest", "high", "medium"])
def matmul_precision(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    assert torch.get_float32_matmul_precision() == request.param, (
        "the user's flag was not given back"
    )
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cast", [None, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_flags_change_nothing(device, cast, compiled, matmul_precision):
    v = torch.randn(192, 192, device=device)
    x = torch.randn(8, 192, device=device)

    def everything(v, x):
        return cwy_matrix(v), tcwy_matrix(v[:, :50]), cwy_multiply(v, x)

    def gradient(call):
        w = v.clone().requires_grad_()
        q, omega, y = call(w, x)
        (q.sum() + omega.square().sum() + (y * x.flip(0)).sum()).backward()
        return q, omega, y, w.grad

    truth = gradient(lambda v, x: [r.float() for r in everything(v.double(), x.double())])
    call = (
        torch.compile(everything, fullgraph=True, backend="aot_eager") if compiled else everything
    )
    with torch.autocast(device, dtype=cast, enabled=cast is not None):
        q, omega, y = call(v, x)
        assert q.dtype == omega.dtype == y.dtype == torch.float32
        assert orthogonality_error(q) <= 5e-6
        assert orthogonality_error(omega) <= 5e-6
        for ours, exact in zip(gradient(call), truth, strict=True):
            assert (ours - exact).norm() <= 1e-5 * exact.norm()


def test_an_inherited_flag_stays_inherited():
    torch.backends.mkldnn.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.fp32_precision = "tf32"
    try:
        with full_precision("cpu"), full_precision("cuda"):
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert torch.backends.mkldnn.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.fp32_precision = "none"
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"
    assert torch.backends.cuda.matmul.fp32_precision == "none"


def test_the_flag_comes_back_from_many_threads():
    torch.set_float32_matmul_precision("high")
    try:

        def work():
            for _ in range(200):
                with full_precision("cpu"), full_precision("cuda"):
                    assert torch.backends.cuda.matmul.fp32_precision == "ieee"

        threads = [threading.Thread(target=work) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


class Products(TorchDispatchMode):
    """Collects the precision at which torch's own products run. Those inside our ops hold their
    own.
    """

    def __init__(self):
        super().__init__()
        self.precisions = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (
            torch.ops.aten.mm,
            torch.ops.aten.bmm,
            torch.ops.aten.addmm,
            torch.ops.aten.baddbmm,
        ):
            self.precisions.append(torch.backends.mkldnn.matmul.fp32_precision)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", [5, 8])
@pytest.mark.parametrize("name", ["matrix", "truncated", "multiply"])
def test_second_derivatives_hold_full_precision(name, size):
    """Autograd runs the products of a recorded backward pass outside our functions."""
    x = torch.randn(3, 8)
    call = {
        "matrix": cwy_matrix,
        "truncated": tcwy_matrix,
        "multiply": lambda v: cwy_multiply(v, x),
    }[name]
    v = torch.randn(8, size, requires_grad=True)
    torch.set_float32_matmul_precision("medium")
    try:
        with Products() as seen:
            (first,) = torch.autograd.grad(call(v).sin().sum(), v, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), v, create_graph=True)
            second.square().sum().backward()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(seen.precisions) <= {"ieee"}


@pytest.mark.gpu
@pytest.mark.parametrize("n", [200, 700])
def test_second_derivatives_hold_full_precision_on_a_gpu(n):
    found = []
    torch.set_float32_matmul_precision("high")
    try:
        for dtype in (torch.float32, torch.float64):
            v = (
                torch.randn(n, n, generator=torch.Generator().manual_seed(0))
                .to("cuda", dtype)
                .requires_grad_()
            )
            (first,) = torch.autograd.grad(cwy_matrix(v).sin().sum(), v, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), v)[0])
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (found[0] - found[1]).norm() <= 1e-4 * found[1].norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_the_ops_are_well_registered(device, batch):
    a = torch.randn(*batch, 4, 4, device=device, requires_grad=True)
    s = (
        torch.randn(*batch, 4, 4, device=device).triu() + 3 * torch.eye(4, device=device)
    ).requires_grad_()
    torch.library.opcheck(torch.ops.cwy.matmul.default, (a, s))
    torch.library.opcheck(torch.ops.cwy.triangular_inverse.default, (s,))
    double = s.detach().double().requires_grad_()
    torch.autograd.gradcheck(
        torch.ops.cwy.triangular_inverse, (double.triu(),), check_forward_ad=True
    )
    torch.autograd.gradcheck(
        torch.ops.cwy.matmul, (a.detach().double().requires_grad_(), double), check_forward_ad=True
    )
