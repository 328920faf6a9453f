"""The stages of the comparison of translation. Each is a list of runs.

Runs are compared on validation pairs. Those of the searches and of the stages "rate", "start" and
"gate" never read their test pairs. Others are tested once, at their best epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ..sweeps import Planned, Records
from . import recipes
from .networks import (
    BASELINES,
    CONTENDERS,
    DECAYED,
    NETWORKS,
    ORTHOGONAL,
    POINTS,
    SEEDS,
    SMALL_CONTENDERS,
    SMALL_SEEDS,
    THIN,
    Network,
    named_as,
)

HELD_OUT = "validation=0.1"
UNTESTED = "final_test=false"
"""For runs that choose a setting."""
EPOCHS = 10
"""The most epochs of a final run."""
ENDS_EARLY = "patience=2"
"""A final run ends when two epochs in a row are not better. The best one is tested anyway."""
QUIET = ("save_every=1000000", "log_every=200")
"""No checkpoints, and a short log."""
DROPOUTS = (0.3, 0.5)
"""Of the stage with a learning rate that decays."""
SCALES = (1, 0.2, 0.05)
"""Of the embeddings, in the stage that compares them."""
INPUT_SCALES = {1: 0.05, 0.05: 20}
"""Scales of the input maps by those of the embeddings, in the same stage.

Large embeddings with small inputs, and small embeddings with large inputs. They show whether the
size of the inputs matters, or how far the embeddings move.
"""
DECAYING_POINT = tuple(f"{name}={value}" for name, value in asdict(recipes.DECAYING).items())
"""The settings of the stage that has one point for all networks."""
GATES: dict[str, tuple[str, ...]] = {
    "none": ("gate=false", "thin_gate=false"),
    "matrices": ("gate=true", "thin_gate=false"),
    "matrices-decoder": ("gate=true", "thin_gate=false", "gate_encoder=false"),
    "thin": ("gate=true", THIN),
    "thin-decoder": ("gate=true", THIN, "gate_encoder=false"),
}
"""Forms of a gate, as settings of ``nmt/small``."""
FREE_RATES = (0.01, 0.003)
"""Learning rates of the free RNN with a gate. ``nmt/small`` has both: one for all weights but the
orthogonal ones, and one for these."""

SMALL = "embedding_scale=0.05"
WARM = "warmup=1000"
PAPER_SETTINGS = ("epochs", "lr", "orthogonal_lr", "optimizer")
"""What the stages at the paper's learning rate keep."""
RESCUES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "small": (SMALL,),
    "clip1": ("clip=1",),
    "clip0.25": ("clip=0.25",),
    "warm": (WARM,),
    "nobias": ("input_bias=false",),
    "zero": ("zero_readout=true",),
    "small-clip": (SMALL, "clip=0.25"),
    "small-warm": (SMALL, WARM),
    "warm-clip": (WARM, "clip=0.25"),
    "small-warm-clip": (SMALL, WARM, "clip=0.25"),
    "all": (SMALL, WARM, "clip=0.25", "zero_readout=true", "input_bias=false"),
}
"""Settings that may rescue the paper's learning rate, by name."""
RESCUED = (
    Network("lstm", "lstm"),
    Network("gru", "gru"),
    Network("rnn", "rnn", ("nonlinearity=tanh",)),
    Network("cwy-128", "cwy", ("nonlinearity=abs", "reflections=128")),
    Network("cwy-1024", "cwy", ("nonlinearity=abs", "reflections=1024")),
)


@dataclass(frozen=True)
class Search:
    """Describe a quasi-random search.

    Attributes:
        folder: of its runs.
        final: how the names of the final runs at its best points begin.
        space: what is searched, uniformly in the logarithm.
        settings: of its runs, apart from their point.
        final_settings: of the final runs, apart from their point.
        recipe: of all these runs.
        seed: of its runs.
    """

    folder: str
    final: str
    space: dict[str, tuple[float, float]]
    settings: tuple[str, ...]
    final_settings: tuple[str, ...] = ()
    recipe: str = "nmt/paper"
    seed: int = SEEDS[0]


FIRST_SEARCH = Search(
    folder="tuning",
    final="tuned",
    space={
        "lr": (3e-4, 4e-3),
        "orthogonal_lr": (1e-4, 1e-2),
        "embedding_scale": (0.03, 1.0),
        "input_scale": (0.5, 4.0),
    },
    settings=("epochs=2",),
)
"""Two epochs at each point."""
SECOND_SEARCH = Search(
    folder="tuning-decay",
    final="tuned-decay",
    space={
        "lr": (5e-4, 5e-3),
        "orthogonal_lr": (5e-4, 5e-3),
        "embedding_scale": (0.05, 1.0),
        "dropout": (0.1, 0.5),
    },
    settings=(WARM, ENDS_EARLY),
    final_settings=(WARM,),
)
"""Up to ten epochs at each point, with a learning rate that decays."""
SMALL_SEARCH = Search(
    folder="tuning-small",
    final="tuned",
    space={
        "lr": (2e-3, 2e-2),
        "embedding_scale": (0.03, 1.0),
        "input_scale": (0.5, 4.0),
        "dropout": (0.05, 0.5),
    },
    settings=("epochs=8", ENDS_EARLY),
    final_settings=("epochs=8",),
    recipe="nmt/small",
    seed=SMALL_SEEDS[0],
)
"""Small networks, with up to eight epochs and one learning rate for all weights."""


def point(number: int, network: Network, search: Search = FIRST_SEARCH) -> tuple[str, ...]:
    """Return a point of a search, as settings. It is the same for every network.

    If the search has no orthogonal learning rate, all weights have one learning rate.
    """
    space = search.space
    drawn = torch.quasirandom.SobolEngine(len(space), scramble=True, seed=0).draw(number + 1)
    found = []
    for (name, (low, high)), part in zip(space.items(), drawn[-1].tolist(), strict=True):
        value = low * math.exp(part * math.log(high / low))
        if name == "orthogonal_lr":
            value *= network.orthogonal_factor
        found.append(f"{name}={value:.3g}")
        if name == "lr" and "orthogonal_lr" not in space:
            found.append(f"orthogonal_lr={value:.3g}")
    return tuple(found)


def trials(networks: Iterable[Network], search: Search = FIRST_SEARCH) -> list[Planned]:
    """Return the runs of a search. All networks come with one point before the next."""
    return [
        _trial(network, number, search)
        for number in range(POINTS)
        for network in networks
        if number < network.points
    ]


def _trial(network: Network, number: int, search: Search) -> Planned:
    start = point(number, network, search)
    settings = (*network.settings, *start, HELD_OUT, UNTESTED, *search.settings, *QUIET)
    folder = f"{search.folder}/{network.name}-{number}"
    return Planned(folder, search.recipe, network.method, search.seed, settings)


def losses(records: Records, network: Network, search: Search) -> dict[int, float]:
    """Return the lowest validation loss at each point whose run has ended.

    It is infinite where the run diverged.
    """
    found = {}
    for number in range(network.points):
        run = _trial(network, number, search)
        best = records.best(run)
        if best is not None:
            found[number] = best
        elif records.diverged(run):
            found[number] = math.inf
    return found


def best_points(
    records: Records, networks: Iterable[Network], search: Search = FIRST_SEARCH
) -> dict[str, int]:
    """Return the number of the best point of each network that has finished runs."""
    best = {}
    for network in networks:
        every = losses(records, network, search)
        finished = {number: loss for number, loss in every.items() if math.isfinite(loss)}
        if finished:
            best[network.name] = min(finished, key=finished.__getitem__)
    return best


def unfinished(records: Records, networks: Iterable[Network], search: Search) -> list[str]:
    """Return a sentence about each network whose search has not ended."""
    sentences = []
    for network in networks:
        ended = len(losses(records, network, search))
        if ended < network.points:
            sentence = (
                f"{network.name}: of {network.points} points of the search {ended} have ended."
            )
            if ended == 0:
                sentence += " Its point is not known, so its networks are left out."
            sentences.append(sentence)
    return sentences


def finals(
    networks: Iterable[Network],
    points: Mapping[str, int],
    seeds: Sequence[int],
    search: Search = FIRST_SEARCH,
) -> list[Planned]:
    """Return the final runs. All networks come with one seed before the next."""
    runs = []
    for seed in seeds:
        for network in networks:
            number = points.get(network.like or network.name)
            if seed not in network.seeds or number is None:
                continue
            start = (*point(number, network, search), *search.final_settings)
            name = f"{search.final}-{network.name}"
            runs.append(_trained(name, network, start, seed, search.recipe))
    return runs


def rescues(names: Iterable[str], epochs: int) -> list[Planned]:
    """Return the runs at the paper's learning rate with these settings."""
    runs = []
    for name in names:
        for network in RESCUED:
            settings = (*network.settings, *RESCUES[name], HELD_OUT, f"epochs={epochs}", *QUIET)
            if epochs < EPOCHS:
                settings = (*settings, UNTESTED)
            else:
                settings = (*settings, ENDS_EARLY)
            folder = f"rate/{name}-{network.name}-epochs{epochs}"
            runs.append(Planned(folder, "nmt/paper", network.method, SEEDS[0], settings))
    return runs


def starts() -> list[Planned]:
    """Return the runs that show what the scale of the embeddings does. All else is the same."""
    networks = (BASELINES[0], *ORTHOGONAL[:2])
    runs = [
        _start(network, str(scale), f"embedding_scale={scale}")
        for network in networks
        for scale in SCALES
    ]
    runs += [
        _start(
            network,
            f"{scale}-inputs{factor}",
            f"embedding_scale={scale}",
            f"input_scale={factor}",
        )
        for scale, factor in INPUT_SCALES.items()
        for network in ORTHOGONAL[:2]
    ]
    return runs


def _start(network: Network, name: str, *scales: str) -> Planned:
    start = (*scales, "lr=1e-3", "orthogonal_lr=1e-3")
    settings = (*network.settings, *start, HELD_OUT, UNTESTED, "epochs=3", *QUIET)
    folder = f"start/{network.name}-{name}"
    return Planned(folder, "nmt/paper", network.method, SEEDS[0], settings)


def decays(
    networks: Iterable[Network], dropouts: Iterable[float], seeds: Sequence[int]
) -> list[Planned]:
    """Return the runs with a learning rate that decays, one for all networks."""
    return [
        _trained(
            f"decay-{network.name}-dropout{dropout}",
            network,
            (*DECAYING_POINT, f"dropout={dropout}"),
            seed,
        )
        for seed in seeds
        for dropout in dropouts
        for network in networks
        if network in DECAYED
    ]


def _trained(
    name: str,
    network: Network,
    start: Iterable[str],
    seed: int,
    recipe: str = "nmt/paper",
) -> Planned:
    """Return a run of up to ten epochs whose best epoch is tested."""
    settings = (*network.settings, *start, HELD_OUT, ENDS_EARLY, *QUIET)
    return Planned(f"nmt/{name}-seed{seed}", recipe, network.method, seed, settings)


def gates() -> list[Planned]:
    """Return the runs of small networks with each form of a gate, without a test."""
    runs = [
        _gate(f"{name}-{nonlinearity}", "cwy", seed, f"nonlinearity={nonlinearity}", *settings)
        for seed in SMALL_SEEDS
        for nonlinearity in ("tanh", "relu")
        for name, settings in GATES.items()
    ]
    runs += [
        _gate(
            f"free-thin-tanh-lr{lr}", "rnn", seed, "nonlinearity=tanh", *GATES["thin"], f"lr={lr}"
        )
        for seed in SMALL_SEEDS
        for lr in FREE_RATES
    ]
    runs += [
        _gate("free-haar-thin-tanh", "rnn", seed, "nonlinearity=tanh", *GATES["thin"], "init=haar")
        for seed in SMALL_SEEDS
    ]
    return runs


def _gate(name: str, method: str, seed: int, *settings: str) -> Planned:
    every = (*settings, HELD_OUT, UNTESTED, *QUIET)
    return Planned(f"gate/{name}-seed{seed}", "nmt/small", method, seed, every)


@dataclass(frozen=True)
class Selection:
    """Hold what a stage is to train. A stage uses the parts that its options name.

    Attributes:
        networks, seeds, dropouts: of the runs.
        rescues: by name.
        points: the best point of each network, by its name. For stages that need a search.
    """

    networks: Sequence[Network] = NETWORKS
    seeds: Sequence[int] = SEEDS
    rescues: Sequence[str] = tuple(RESCUES)
    dropouts: Sequence[float] = DROPOUTS
    points: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """Describe a stage.

    Attributes:
        plan: returns the runs for a selection.
        options: the parts of a selection that it uses, as the command line names them.
        search: whose best points it needs.
        searched: the networks of that search.
        fixed: settings that the names of its runs state, and that are the same for all of them.
    """

    plan: Callable[[Selection], list[Planned]]
    options: tuple[str, ...] = ()
    search: Search | None = None
    searched: Sequence[Network] = ()
    fixed: tuple[str, ...] = ()

    def every_run(self, **chosen: Any) -> list[Planned]:
        """Return all runs that the stage can have, with a point for each search.

        Args:
            chosen: parts of a selection. All of the others are whole.
        """
        points = {network.name: 0 for network in self.searched if network.points > 0}
        return self.plan(replace(Selection(points=points), **chosen))

    def decided(self) -> set[str]:
        """Return the settings that the stage decides: those in which its runs differ, or named."""
        found = set(self.fixed)
        if self.search is not None:
            found |= self.search.space.keys()
        planned = [dict(text.split("=", 1) for text in run.settings) for run in self.every_run()]
        for key in {key for settings in planned for key in settings}:
            if len({settings.get(key) for settings in planned}) > 1:
                found.add(key)
        return found


STAGES: dict[str, Stage] = {
    "tune": Stage(lambda chosen: trials(chosen.networks), ("networks",)),
    "final": Stage(
        lambda chosen: finals(chosen.networks, chosen.points, chosen.seeds),
        ("networks", "seeds"),
        search=FIRST_SEARCH,
        searched=NETWORKS,
    ),
    "rate": Stage(lambda chosen: rescues(RESCUES, epochs=3), fixed=PAPER_SETTINGS),
    "best-rate": Stage(
        lambda chosen: rescues(chosen.rescues, EPOCHS), ("rescues",), fixed=PAPER_SETTINGS
    ),
    "start": Stage(lambda chosen: starts()),
    "decay": Stage(
        lambda chosen: decays(chosen.networks, chosen.dropouts, chosen.seeds),
        ("networks", "seeds", "dropouts"),
    ),
    "gate": Stage(lambda chosen: gates()),
    "tune-decay": Stage(
        lambda chosen: trials(named_as(chosen.networks, CONTENDERS), SECOND_SEARCH), ("networks",)
    ),
    "final-decay": Stage(
        lambda chosen: finals(
            named_as(chosen.networks, CONTENDERS), chosen.points, chosen.seeds, SECOND_SEARCH
        ),
        ("networks", "seeds"),
        search=SECOND_SEARCH,
        searched=CONTENDERS,
    ),
    "tune-small": Stage(
        lambda chosen: trials(named_as(chosen.networks, SMALL_CONTENDERS), SMALL_SEARCH),
        ("networks",),
    ),
    "final-small": Stage(
        lambda chosen: finals(
            named_as(chosen.networks, SMALL_CONTENDERS), chosen.points, SMALL_SEEDS, SMALL_SEARCH
        ),
        ("networks",),
        search=SMALL_SEARCH,
        searched=SMALL_CONTENDERS,
    ),
}
"""The stages by their names."""
