"""Theorem 4, as far as a short run can show it: the slope, the norms, and the step that the theorem
is about.
"""

import io
import math

import pytest
import torch
from rich.console import Console

from cwy.experiments.convergence.report import ROUNDING, slope
from cwy.experiments.engine.config import ConfigError
from cwy.experiments.engine.runner import Sweep, train
from cwy.experiments.engine.signals import Stop
from cwy.experiments.engine.task import load, settings
from cwy.experiments.report import find_runs
from cwy.experiments.report.panels import arrange


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out, console = tmp_path_factory.mktemp("convergence"), Console(file=io.StringIO(), width=80)
    train(Sweep("convergence/small", ["cwy", "tcwy"], out=out), console, Stop())
    return find_runs([out]), console.file.getvalue()


@pytest.mark.slow
def test_the_gradient_falls_as_fast_as_the_theorem_says_and_no_vector_gets_shorter(trained):
    runs, said = trained
    for run in runs:
        assert run.config["precision"] == "float64"
        rate, error = slope(run)
        assert rate <= -0.5 + error, run.method
        assert 0 < error < 0.25
        growths, norms = run.curve("test", "growth")[1], run.curve("test", "norm")[1]
        assert min(growths) >= -ROUNDING
        assert norms == sorted(norms)
        minima, gradients = run.curve("test", "minimum")[1], run.curve("test", "gradient")[1]
        assert minima == sorted(minima, reverse=True)
        assert all(low <= now for low, now in zip(minima, gradients, strict=True))
        fitted = f"slope {rate:.2f} ± {error:.2f} ({run.method})".replace("-", "−")
        assert (
            f"{fitted}, as fast as the theorem's −0.5 or faster, and no vector ever gets shorter.\n"
            in said
        )
    told = arrange(runs)[0].finding
    assert "as fast as the theorem's −0.5 or faster, and no vector ever gets shorter" in told


@pytest.mark.parametrize("method", ["cwy", "tcwy"])
def test_a_step_is_the_theorems(method):
    one = settings("convergence/small", method, 3)
    task = load("convergence")(one, torch.device("cpu"))
    model, k = task.model(), 7
    start = model.vectors.detach().clone()
    assert torch.equal(start, start[:1].expand_as(start)), "every replica starts alike"
    # Its gradient has the right mean: over every term once, minibatches give f's own.
    every = torch.arange(one.config.terms).expand(one.config.replicas, -1)
    torch.testing.assert_close(task.objective(model(), every), task.objective(model()))
    batch = task.batch(k - 1)
    loss, _ = task.loss(model, batch)
    loss.backward()
    (own,) = torch.autograd.grad(task.objective(model(), batch[0])[2], model.vectors)
    torch.testing.assert_close(task.rate(k - 1) * model.vectors.grad[2], own[2] / math.sqrt(k))
    task.watch(model)
    (whole,) = torch.autograd.grad(task.objective(model())[0], model.vectors)
    torch.testing.assert_close(model.minimum, whole.square().sum())


def test_a_size_that_a_method_cannot_have_is_refused():
    for method, sizes in (
        ("cwy", ("N=5", "M=4")),
        ("tcwy", ("N=4", "M=4")),
        ("tcwy", ("N=3", "M=4")),
    ):
        with pytest.raises(ConfigError, match="cwy needs N = M, tcwy N > M"):
            load("convergence")(settings("convergence", method, 0, sizes), torch.device("cpu"))
