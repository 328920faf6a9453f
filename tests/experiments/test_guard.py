"""The guard: no step with a value that is not finite changes a weight."""

from copy import deepcopy

import pytest
import torch

from cwy.experiments.engine import checkpoint
from cwy.experiments.engine.distributed import Group
from cwy.experiments.engine.monitor import Diverged, Guard
from cwy.optim import Joint, for_model
from tests.helpers.runs import loop, rows, same, weights

pytestmark = pytest.mark.slow


def fused_loop(folder, **settings):
    """A run whose optimizer skips steps of free weights, but not those on the manifold."""
    run = loop(folder, "rgd-c-c", optimizer="adam", clip=1.0, **settings)
    run.optimizer = for_model(run.model, 1e-3, 1e-3, torch.optim.Adam, fused=True)
    for group in run.optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    run.guard = Guard(run.model, run.optimizer, run.device)
    return run


@pytest.mark.parametrize("loop", [loop, fused_loop])
def test_a_gradient_that_is_not_finite_stops_the_run_before_its_step(loop, tmp_path):
    loop(tmp_path / "fine", iterations=12).run()
    broken = loop(tmp_path / "run")
    # The gradient of step 13, at one place.
    broken.model.readout.bias.register_hook(
        lambda g: g.index_fill(0, torch.tensor(3), torch.nan if broken.step == 12 else g[3])
    )
    with pytest.raises(
        Diverged, match=r"of step 13 was not finite: .* last good checkpoint is .*step-00000007\.pt"
    ):
        broken.run()
    # A step along a gradient of zero may round a weight on the manifold.
    expected = weights(tmp_path / "fine")
    torch.testing.assert_close(broken.model.state_dict(), expected, rtol=0, atol=1e-6)
    assert [path.name for path in checkpoint.listed(tmp_path / "run" / "checkpoints")] == [
        "step-00000007.pt"
    ]
    assert [row["step"] for row in rows(tmp_path / "run")] == [5, 10]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_stay_from_the_first_bad_step_on(device):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).to(device)
    fused = torch.optim.Adam(model[0].parameters(), fused=True, capturable=device == "cuda")
    optimizer = Joint([fused, torch.optim.SGD(model[1].parameters(), lr=0.1)])
    guard = Guard(model, optimizer, torch.device(device))
    states = []
    for factor in (1.0, 1.0, torch.nan, 1.0):
        loss = model(torch.ones(2, 3, device=device)).square().mean()
        loss.backward()
        model[0].bias.grad[1] *= factor
        guard.screen(loss)
        optimizer.step()
        optimizer.zero_grad()
        remembered = {
            f"{number} {name}": value
            for number, state in fused.state_dict()["state"].items()
            for name, value in state.items()
        }
        states.append(deepcopy({**model.state_dict(), **remembered}))
    assert not same(states[0], states[1])
    assert same(states[1], states[2])
    assert same(states[1], states[3])
    with pytest.raises(Diverged, match="of step 3 was not finite"):
        guard.check(4, Group(device), print)
