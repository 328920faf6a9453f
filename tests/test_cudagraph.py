"""Steps captured in CUDA graphs train as eager ones do."""

import pytest
import torch

import cwy
from cwy import cudagraph


def _training(device, capture):
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        cwy.orthogonal(torch.nn.Linear(16, 16)),
        torch.nn.Tanh(),
        cwy.nn.OrthogonalRNN(16, 24, nonlinearity="modrelu", output="last"),
    ).to(device)
    rate = torch.tensor(1e-2, device=device)
    options = {"capturable": True} if device == "cuda" else {}
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, **options)

    def step(x):
        loss = model(x)[0].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    train = cudagraph.capture(step, warmup=2) if capture else step
    # Two shapes, each long enough to be captured and replayed.
    batches = [torch.randn(20, 3 + index % 2, 16) for index in range(12)]
    losses = [train(batch.to(device)) for batch in batches]
    return torch.stack(losses).cpu(), [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_captured_step_trains_as_an_eager_one(device):
    eager_losses, eager = _training(device, capture=False)
    losses, captured = _training(device, capture=True)
    # The copies that a captured step returns keep their values.
    torch.testing.assert_close(losses, eager_losses, rtol=1e-4, atol=1e-6)
    for found, wanted in zip(captured, eager, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_a_failed_capture_leaves_no_trace():
    stream = torch.cuda.current_stream()
    v = torch.randn(64, 8, device="cuda", requires_grad=True)
    z = torch.randn(64, 8, device="cuda")
    both = lambda: torch.autograd.grad(cwy.ops.tcwy_matrix(v), v, z)
    captured = cudagraph.CapturedCall(both)
    with torch.no_grad():
        v.copy_(torch.randn(64, 8, device="cuda"))
    captured.replay()
    torch.testing.assert_close(captured.outputs[0], both()[0])
    event = torch.cuda.Event()

    def waits():
        # Torch's own check does not see this: the capture itself fails.
        event.record()
        event.synchronize()
        return v.sum()

    for call in (lambda: v.sum().item(), waits):
        torch.manual_seed(3)
        expected = torch.randn(4, device="cuda")
        torch.manual_seed(3)
        with pytest.raises(cudagraph.CaptureError):
            cudagraph.CapturedCall(call)
        assert torch.cuda.current_stream() == stream
        assert torch.cuda.get_sync_debug_mode() == 0
        torch.testing.assert_close(torch.randn(4, device="cuda"), expected)
    cudagraph.CapturedCall(both)


@pytest.mark.gpu
def test_a_step_that_synchronizes_is_refused_or_runs_eagerly():
    x = torch.ones(3, device="cuda")
    with pytest.raises(cudagraph.CaptureError):
        cudagraph.CapturedCall(lambda: x.sum().item())
    failures = []
    step = cudagraph.capture(lambda y: y * y.sum().item(), warmup=1, on_failure=failures.append)
    for _ in range(4):
        torch.testing.assert_close(step(x), 3 * x)
    assert len(failures) == 1
    assert step.settled
    # The device and its random generator work as before.
    assert torch.randn(4, device="cuda").isfinite().all()


@pytest.mark.gpu
def test_a_captured_call_reads_new_inputs_and_new_random_numbers():
    drawn = cudagraph.CapturedCall(
        lambda x: x + torch.rand_like(x), (torch.zeros(64, device="cuda"),)
    )
    first = drawn(torch.zeros(64, device="cuda")).clone()
    second = drawn(torch.ones(64, device="cuda")).clone()
    assert (second >= 1).all()
    assert not torch.equal(first, second - 1)


def test_what_is_not_a_tensor_is_refused():
    with pytest.raises(TypeError, match="argument 1 is int"):
        cudagraph.capture(lambda x, n: x)(torch.ones(2), 3)
    with pytest.raises(ValueError, match="warmup"):
        cudagraph.capture(lambda x: x, warmup=0)
