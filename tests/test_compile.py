"""Ahead-of-time and just-in-time compilers, with their real back ends."""

import pytest
import torch
from torch import nn

import cwy


def model():
    return nn.Sequential(cwy.orthogonal(nn.Linear(24, 24)), cwy.orthogonal(nn.Linear(24, 10)))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_inductor_trains_as_eager_does(device):
    eager, compiled = model().to(device), model().to(device)
    compiled.load_state_dict(eager.state_dict())
    x = torch.randn(8, 24, device=device)
    step = torch.compile(lambda x: compiled(x).square().sum(), fullgraph=True)
    for _ in range(2):
        loss, other = eager(x).square().sum(), step(x)
        torch.testing.assert_close(other, loss)
        loss.backward()
        other.backward()
        for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_inductor_and_complex_numbers():
    v = torch.randn(6, 5, dtype=torch.complex64, requires_grad=True)
    q, other = (form(v) for form in (cwy.ops.cwy_matrix, torch.compile(cwy.ops.cwy_matrix)))
    torch.testing.assert_close(other, q)
    slopes = [torch.autograd.grad(made.real.sin().sum(), v)[0] for made in (q, other)]
    torch.testing.assert_close(*slopes)


@pytest.mark.slow
def test_aot_inductor(tmp_path):
    net, x = model().eval(), torch.randn(8, 24)
    package = torch._inductor.aoti_compile_and_package(
        torch.export.export(net, (x,)), package_path=str(tmp_path / "net.pt2")
    )
    torch.testing.assert_close(torch._inductor.aoti_load_package(package)(x), net(x))


def test_an_exported_program_survives_a_file(tmp_path):
    net, x = model().eval(), torch.randn(8, 24)
    torch.export.save(torch.export.export(net, (x,)), tmp_path / "net.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "net.pt2").module()(x), net(x))


def test_a_baked_model_exports_without_our_ops():
    program = torch.export.export(cwy.bake(model()), (torch.randn(8, 24),))
    assert not any("cwy" in str(node.target) for node in program.graph.nodes)
