"""The guard: no step with a value that is not finite changes a weight."""

from copy import deepcopy

import pytest
import torch

from cwy.experiments.engine import checkpoint
from cwy.experiments.engine.distributed import Group
from cwy.experiments.engine.monitor import Diverged, Guard
from cwy.experiments.engine.runner import RunError
from cwy.optim import Joint, for_model
from tests.helpers.runs import loop, rows, same, train, weights

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
    expected = weights(tmp_path / "fine")
    if loop is fused_loop:
        # A step along a gradient of zero may round a weight on the manifold.
        torch.testing.assert_close(broken.model.state_dict(), expected, rtol=0, atol=1e-6)
    else:
        assert same(broken.model.state_dict(), expected)
    assert [path.name for path in checkpoint.listed(tmp_path / "run" / "checkpoints")] == [
        "step-00000007.pt"
    ]
    assert [row["step"] for row in rows(tmp_path / "run")] == [5, 10]


def test_finite_gradients_whose_norm_overflows_stop_the_run(tmp_path):
    broken = loop(tmp_path / "run", clip=1.0)
    broken.model.readout.bias.register_hook(
        lambda g: torch.full_like(g, 1e30) if broken.step == 12 else g
    )
    with pytest.raises(Diverged, match="of step 13 was not finite"):
        broken.run()
    with pytest.raises(RunError, match="holds a run that diverged"):
        train(tmp_path / "run", clip=1.0)


def fused_adam(parameters, device):
    return torch.optim.Adam(parameters, fused=True, capturable=device == "cuda")


def fused_and_plain(model, device):
    """Two optimizers, of which one is fused."""
    plain = torch.optim.SGD(model[1].parameters(), lr=0.1)
    return Joint([fused_adam(model[0].parameters(), device), plain])


def fused_in_part(model, device):
    """One optimizer with a group that is fused and one that is not."""
    fused = {"params": list(model[0].parameters()), "fused": True}
    plain = {"params": list(model[1].parameters()), "fused": False}
    return torch.optim.SGD([fused, plain], lr=0.1)


def remembered(optimizer):
    """What an optimizer remembers of each parameter, as a flat dictionary."""
    return {
        f"{number} {name}": value
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }


@pytest.mark.parametrize("bad", ["loss", "gradient"])
@pytest.mark.parametrize("build", [fused_and_plain, fused_in_part])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_stay_from_the_first_bad_step_on(device, build, bad):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).to(device)
    optimizer = build(model, device)
    guard = Guard(model, optimizer, torch.device(device))
    states = []
    for factor in (1.0, 1.0, torch.nan, 1.0):
        loss = model(torch.ones(2, 3, device=device)).square().mean()
        loss.backward()
        if bad == "loss":
            loss = loss.detach() * factor
        else:
            model[0].bias.grad[1] *= factor
        guard.screen(loss)
        optimizer.step()
        optimizer.zero_grad()
        states.append(deepcopy({**model.state_dict(), **remembered(optimizer)}))
    assert not same(states[0], states[1])
    assert same(states[1], states[2])
    assert same(states[1], states[3])
    with pytest.raises(Diverged, match="of step 3 was not finite"):
        guard.check(4, Group(device), print)
