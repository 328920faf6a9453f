r"""Methods side by side: recover a rotation from noisy point pairs.

A weight W is trained until $W x_i \approx y_i$, where $y_i = Q_* x_i$ + noise and the rotation $Q_*$ is not known. Every
method for real weights starts at the identity, and all take the same steps of the same optimiser; the best rotation is
known in closed form.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch import Tensor, nn

from .. import __version__, init
from ..api import orthogonal
from ..registry import METHODS
from ..testing import orthogonality_error

# N is even: then a product of N reflections has determinant +1, as every other map's matrices have.
N, PAIRS, NOISE, RATE = 64, 96, 0.1, 0.03
FREE, BEST = "unconstrained", "best fit (SVD)"
FILE = "demo.png"
MARKERS = "osD^vP*X<>"
COLOURS = [f"C{i}" for i in range(10) if i != 7]  # grey is the unconstrained weight's


@dataclass(frozen=True)
class Problem:
    """``y = x Q*^T + noise`` for ``x``, ``y`` ``(PAIRS, N)``; ``best`` is the rotation closest to these pairs."""

    seed: int
    x: Tensor
    y: Tensor
    rotation: Tensor
    best: Tensor

    def error(self, weight: Tensor) -> float:
        r"""How far a weight is from the true rotation: $\lVert W - Q_*\rVert_F / \lVert Q_*\rVert_F$."""
        return ((weight.detach() - self.rotation).norm() / self.rotation.norm()).item()


@dataclass(frozen=True)
class Run:
    """One method's training: ``errors`` before the first step and after each, ``seconds`` of a step (the median)."""

    name: str
    errors: list[float]
    loss: float
    orthogonality: float
    seconds: float
    parameters: int


def problem(seed: int) -> Problem:
    """A Haar-random rotation, Gaussian points and noise, all drawn by the seed; the caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        rotation = init.haar(N, N, dtype=torch.float32)
        rotation[0] *= torch.linalg.det(rotation).sign()
        x = torch.randn(PAIRS, N)
        y = x @ rotation.mT + NOISE * torch.randn(PAIRS, N)
    # Kabsch: the polar factor of the correlation, its last direction turned round if that is a reflection.
    left, _, right = torch.linalg.svd(y.mT @ x)
    left[:, -1] *= torch.linalg.det(left @ right).sign()
    return Problem(seed, x, y, rotation, left @ right)


def choose(names: Sequence[str] | None = None) -> tuple[list[str], dict[str, str]]:
    """The methods that take part, and of those that can't, why.

    Args:
        names: those asked for; all registered ones by default. One asked for that is unknown or can't take part raises.
    """
    asked = METHODS if names is None else dict.fromkeys(name.strip() for name in names if name.strip())
    if not asked:
        raise ValueError(f"no method is named. Registered: {', '.join(METHODS)}.")
    entrants, skipped = [], {}
    for name in asked:
        reason = _why_not(name)
        if reason is None:
            entrants.append(name)
        elif names is None:
            skipped[name] = reason
        else:
            raise ValueError(f"method {name!r} can't take part: {reason}")
    return entrants, skipped


def _why_not(name: str) -> str | None:
    if METHODS[name].kind == "tall":
        return "it serves weights that are not square."
    if METHODS[name].on_manifold:
        return "its weight is no function of free parameters; cwy.optim moves it."
    try:
        _layer(name)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def _layer(name: str) -> nn.Linear:
    """A linear layer that starts at the identity; complex, and at random, for the methods that are unitary alone."""
    if name in METHODS and not METHODS[name].real:
        return orthogonal(nn.Linear(N, N, bias=False, dtype=torch.complex64), method=name)
    layer = nn.Linear(N, N, bias=False)
    if name == FREE:
        nn.init.eye_(layer.weight)
        return layer
    return orthogonal(layer, method=name, init="identity")


def train(task: Problem, name: str, steps: int, watch: Callable[[float], object] = lambda loss: None) -> Run:
    """Trains one method with Adam on all pairs; ``watch`` gets the loss of each step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        layer = _layer(name)
    optimiser = torch.optim.Adam(layer.parameters(), lr=RATE)
    errors, seconds, loss = [], [], 0.0
    for _ in range(steps):
        start = time.perf_counter()
        optimiser.zero_grad()
        weight = layer.weight
        objective = (task.x.to(weight.dtype) @ weight.mT - task.y).abs().square().mean()
        objective.backward()
        # Off the clock, but before the step: that changes a free weight in place.
        paused = time.perf_counter()
        errors.append(task.error(weight))
        resumed = time.perf_counter()
        optimiser.step()
        seconds.append(time.perf_counter() - resumed + paused - start)
        loss = objective.item()
        watch(loss)
    weight = layer.weight.detach()
    errors.append(task.error(weight))
    parameters = sum(p.numel() for p in layer.parameters())
    return Run(name, errors, loss, orthogonality_error(weight), median(seconds), parameters)


def race(console: Console, names: Sequence[str], seed: int, steps: int) -> tuple[Problem, list[Run]]:
    """Trains the methods, then the unconstrained weight, with live progress."""
    bars = Progress(
        TextColumn("{task.description:14}"),
        BarColumn(bar_width=24),
        TextColumn("step"),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        console=console,
    )
    runs = []
    with bars, _one_thread():
        task = problem(seed)
        ids = {name: bars.add_task(name, total=steps, loss="") for name in (*names, FREE)}
        for name, bar in ids.items():
            runs.append(train(task, name, steps, lambda loss, bar=bar: bars.update(bar, advance=1, loss=f"loss {loss:.4f}")))
    return task, runs


@contextmanager
def _one_thread() -> Generator[None]:
    # At this size threads gain nothing, and on a busy machine each waits for the other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def introduction(steps: int, names: Sequence[str], skipped: dict[str, str]) -> str:
    """What is about to be done, and who can't take part."""
    told = [
        f"A rotation Q of {N} dimensions is to be recovered from {PAIRS} pairs of points (x, Qx + {NOISE:.0%} noise). "
        f"Each method trains a {N} x {N} weight from the identity, with Adam at rate {RATE}; steps of each: {steps}."
    ]
    unitary = [name for name in names if not METHODS[name].real]
    if unitary:
        told.append(f"Unitary alone, {_listed(unitary)} train a complex weight from a random start.")
    reasons = dict.fromkeys(skipped.values())
    told += [f"Skipped {', '.join(name for name in skipped if skipped[name] == reason)}: {reason}" for reason in reasons]
    return "\n".join(told)


def table(task: Problem, runs: Sequence[Run]) -> Table:
    """The results, a row a method, with the closed-form solution last."""
    view = Table(box=SIMPLE_HEAD)
    view.add_column("method", no_wrap=True)
    for heading in ("error to the\ntrue rotation", "orthogonality\nerror", "time\na step", "parameters"):
        view.add_column(heading, justify="right")
    for run in runs:
        cells = f"{run.errors[-1]:.1%}", f"{run.orthogonality:.1g}", f"{run.seconds * 1e3:.2f} ms", str(run.parameters)
        view.add_row(run.name, *cells, end_section=run is runs[-1])
    view.add_row(BEST, f"{task.error(task.best):.1%}", f"{orthogonality_error(task.best):.1g}", "", "")
    return view


def findings(task: Problem, runs: Sequence[Run]) -> str:
    """What the table shows, in sentences that hold for these very numbers."""
    *methods, free = runs
    best = task.error(task.best)
    there = [run.name for run in methods if run.errors[-1] <= 1.1 * best]
    behind = [run.name for run in methods if run.name not in there]
    verdicts = [f"{_listed(there)} {'get' if there[1:] else 'gets'} there"] if there else []
    if behind:
        verdicts.append(f"{_listed(behind)} {'are' if behind[1:] else 'is'} not there yet")
    told = [f"Because of the noise even the rotation that fits best is {best:.1%} off: {'; '.join(verdicts)}."]
    for group in _same_path(methods):
        if len(group) > 1:
            times = sorted(run.seconds * 1e3 for run in group)
            told.append(
                f"{_listed([run.name for run in group])} take one path, at {times[0]:.2f} to {times[-1]:.2f} ms a step."
            )
    overfits = free.loss < nn.functional.mse_loss(task.x @ task.best.mT, task.y).item()
    fit = f"fits the noise too: it ends {free.errors[-1] / best:.1f} times as far off, and" if overfits else "stretches: it"
    told.append(f"The unconstrained weight {fit} is no rotation (orthogonality error {free.orthogonality:.1g}).")
    return "\n".join(told)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _same_path(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs, grouped by errors that agree to a percent at every step."""
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if all(abs(a - b) <= 0.01 * b for a, b in zip(run.errors, group[0].errors, strict=True)):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def plot(task: Problem, runs: Sequence[Run], path: Path) -> None:
    """Draws error over steps and over time into a PNG that appears whole or not at all."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    for i, run in enumerate(runs):
        # Markers in turn, so that curves that coincide are all seen.
        style = {"marker": MARKERS[i % len(MARKERS)], "markersize": 5, "markevery": ((i + 0.5) / len(runs) / 8, 1 / 8)}
        style |= {"label": run.name, "color": "0.5" if run.name == FREE else COLOURS[i % len(COLOURS)]}
        by_step.plot(run.errors, **style)
        by_time.plot([step * run.seconds * 1e3 for step in range(1, len(run.errors))], run.errors[1:], **style)
    for axes in (by_step, by_time):
        axes.axhline(task.error(task.best), color="black", linestyle=":", linewidth=1.5, label=BEST)
        axes.grid(which="both", alpha=0.25)
    by_step.set(xlabel="step", ylabel="error to the true rotation, ‖W − Q‖ / ‖Q‖", yscale="log", title="by step")
    by_time.set(xlabel="training time, ms (steps × median time a step)", xscale="log", title="by time")
    by_step.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    by_step.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    by_step.yaxis.set_minor_formatter(NullFormatter())
    by_time.xaxis.set_major_formatter("{x:g}")
    figure.legend(*by_time.get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.suptitle(f"Recovering a {N} × {N} rotation from {PAIRS} noisy point pairs")
    figure.supxlabel(context(task), fontsize="small", color="0.4")
    partial = path.with_name(f".{path.name}.partial")
    try:
        figure.savefig(partial, format="png", dpi=150)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def context(task: Problem) -> str:
    """What the numbers belong to."""
    return f"cwy {__version__}, torch {torch.__version__}, one CPU thread, float32, seed {task.seed}"
