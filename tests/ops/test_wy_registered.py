"""The registered ops: what compilers are shown, and that compiled programs compute what eager ones
do.
"""

import pytest
import torch
from torch.library import opcheck

import cwy
from cwy import ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES = [((), 6, 4), ((), 5, 5), ((2,), 4, 7), ((2, 3), 5, 2)]
EMPTY = [((3,), 0, 0), ((), 0, 2), ((3,), 4, 0), ((0,), 4, 2)]


def vectors(batch, n, size, dtype=torch.float32, device="cpu"):
    torch.manual_seed(n)
    return torch.randn(*batch, n, size, dtype=dtype, device=device, requires_grad=True)


def some_signs(v, count):
    signs = torch.ones(*v.shape[:-2], count, dtype=v.dtype, device=v.device)
    signs[..., ::2] = -1
    return signs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize(("batch", "n", "size"), [*SIZES[1:], *EMPTY])
def test_opcheck(batch, n, size, dtype, device):
    v = vectors(batch, n, size, dtype, device)
    x = torch.randn(*batch, 3, n, dtype=dtype, device=device, requires_grad=True)
    opcheck(torch.ops.cwy.wy_factors.default, (v,))
    opcheck(torch.ops.cwy.cwy_matrix.default, (v, some_signs(v, n)))
    opcheck(torch.ops.cwy.cwy_multiply.default, (v, x, batch == ()))
    if size <= n:
        opcheck(torch.ops.cwy.tcwy_matrix.default, (v, None))


def calls(v):
    """Each function of the vectors, with and without signs, as one tensor."""
    batch, n, size = v.shape[:-2], v.shape[-2], v.shape[-1]
    signs = some_signs(v, n).detach()
    x = torch.linspace(-1, 1, 3 * n, dtype=torch.float64).reshape(3, n)
    x = x.expand(*batch, 3, n).to(v)
    made = {
        "factors": lambda v: torch.cat([part.flatten() for part in ops.wy_factors(v)]),
        "matrix": ops.cwy_matrix,
        "signed": lambda v: ops.cwy_matrix(v, signs=signs),
        "multiply": lambda v: ops.cwy_multiply(v, x),
        "adjoint": lambda v: ops.cwy_multiply(v, x, adjoint=True),
    }
    if size <= n:
        made["truncated"] = lambda v: ops.tcwy_matrix(v, signs=signs[..., :size])
    return made


def with_slope(form, v):
    """A result and its gradient."""
    result = form(v)
    (slope,) = torch.autograd.grad(result.abs().square().sin().sum() + result.real.sum(), v)
    return result.detach(), slope


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize(("batch", "n", "size"), SIZES)
def test_compiled_equals_eager(batch, n, size, dtype, device):
    v = vectors(batch, n, size, dtype, device)
    for form in calls(v).values():
        compiled = torch.compile(form, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(with_slope(compiled, v), with_slope(form, v))
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "n", "size"),
    [((), 64, 64), ((3,), 100, 40), ((), 700, 700), ((), 1100, 300), ((2,), 600, 600)],
)
def test_compiled_kernels_equal_eager_ones(batch, n, size):
    v = vectors(batch, n, size, device="cuda")
    for form in calls(v).values():
        compiled = torch.compile(form, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(
            with_slope(compiled, v), with_slope(form, v), rtol=1e-4, atol=2e-4
        )
    torch._dynamo.reset()


def test_a_compiler_sees_one_op():
    v = vectors((), 6, 4)
    for name, form in calls(v).items():
        if name == "factors":
            continue

        class Model(torch.nn.Module):
            def forward(self, v, form=form):
                return form(v)

        program = torch.export.export(Model(), (v.detach(),))
        ours = [node for node in program.graph.nodes if "cwy" in str(node.target)]
        assert len(ours) == 1, name
        torch.testing.assert_close(program.module()(v.detach()), form(v).detach())


def test_sizes_may_be_dynamic():
    form = torch.compile(ops.cwy_matrix, backend="aot_eager", fullgraph=True, dynamic=True)
    for n, size in [(6, 4), (7, 5), (9, 3), (5, 5), (6, 8)]:
        v = vectors((), n, size, torch.float64)
        torch.testing.assert_close(with_slope(form, v), with_slope(ops.cwy_matrix, v))
    torch._dynamo.reset()


def test_parallel_vectors_stay_exact():
    v = torch.ones(40, 30) + 1e-3 * torch.randn(40, 30)
    form = torch.compile(ops.cwy_matrix, backend="aot_eager", fullgraph=True)
    assert cwy.orthogonality_error(form(v)) < 1e-5
    with torch.autocast("cpu", torch.bfloat16):
        assert cwy.orthogonality_error(form(v)) < 1e-5
    torch._dynamo.reset()


def test_transforms_inside_a_compiled_function():
    v = vectors((), 5, 4, torch.float64).detach()
    tangent = torch.randn_like(v)

    def forward_mode(v):
        return torch.func.jvp(ops.cwy_matrix, (v,), (tangent,))[1]

    def slope(v):
        return torch.func.grad(lambda v: ops.cwy_matrix(v).sin().sum())(v)

    for form in (forward_mode, slope):
        compiled = torch.compile(form, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(v), form(v))
    torch._dynamo.reset()


def test_second_derivatives_raise():
    v = vectors((), 5, 4)
    q = torch.ops.cwy.cwy_matrix(v, None)[0]
    (slope,) = torch.autograd.grad(q.sin().sum(), v, create_graph=True)
    with pytest.raises(RuntimeError, match="cwy_matrix"):
        slope.sum().backward()


def test_wrong_signs_are_refused_when_the_program_runs():
    v = vectors((), 5, 4)
    form = torch.compile(
        lambda v, signs: ops.cwy_matrix(v, signs=signs), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(ValueError, match="signs"):
        form(v, torch.full((5,), 0.5))
    torch._dynamo.reset()
