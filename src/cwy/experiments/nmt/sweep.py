"""Tune and train the networks of translation. Each stage is a command.

1. "tune": networks with a search get the same points, two epochs each.
2. "final": every network is trained for up to ten epochs with several seeds,
   at its best point.
3. "rate": the paper's learning rate, as it is and with eleven settings that
   may rescue it.
4. "best-rate": those of these settings that --rescues names, for ten epochs.
5. "start": three networks with embeddings of three scales.
6. "common": three networks at one point for all, for ten epochs, with dropout
   and without. The search prefers points that learn fast, and an LSTM begins
   slowly.
7. "decay": the same with a learning rate that decays, for more networks, with
   two amounts of dropout.
8. "gate": forms of a gate in small networks, compared on validation pairs.

python -m cwy.experiments.nmt.sweep STAGE OUT [--device cuda] [...]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..engine.config import ConfigError, choose
from ..engine.runner import check_device
from ..sweeps import Place, Planned, lines, merge, read, restore, train
from . import recipes

STAGES = ("tune", "final", "rate", "best-rate", "start", "common", "decay", "gate")
SEEDS = (0, 1, 2)
POINTS = 10
HELD_OUT = "validation=0.1"
UNTESTED = "final_test=false"
"""For runs that choose a setting."""
EPOCHS = 10
"""The most epochs of a final run."""
PATIENCE = "patience=2"
"""A final run ends when two epochs in a row are not better. The best one is tested anyway."""
QUIET = ("save_every=1000000", "log_every=200")
"""No checkpoints, and a short log."""
SPACE = {
    "lr": (3e-4, 4e-3),
    "orthogonal_lr": (1e-4, 1e-2),
    "embedding_scale": (0.03, 1.0),
    "input_scale": (0.5, 4.0),
}
"""What is searched, uniformly in the logarithm."""


DROPOUTS = (0.3, 0.5)
"""Of the stage with a learning rate that decays."""
SCALES = (1, 0.2, 0.05)
"""Of the embeddings, in the stage that compares them."""
COMMON = ("lr=1e-3", "orthogonal_lr=1e-3", "embedding_scale=0.2")
"""The point of the stage that has one for all."""
DECAYING = tuple(f"{name}={value}" for name, value in asdict(recipes.DECAYING).items())
"""The same, with a learning rate that rises to twice as much, and falls to about half as much."""


@dataclass(frozen=True)
class Network:
    """Describe one network of the comparison.

    Attributes:
        name: of its runs.
        method: as ``cwy train`` takes it.
        settings: ``key=value`` texts that make it this network.
        points: how many points of the search it gets, 0 for those of another network.
        like: the network whose point it takes, its own by default.
        seeds: of its final runs.
        step: by which the searched orthogonal learning rate is multiplied.
    """

    name: str
    method: str
    settings: tuple[str, ...] = ()
    points: int = POINTS
    like: str | None = None
    seeds: tuple[int, ...] = SEEDS
    step: float = 1.0


def _cwy(nonlinearity: str, reflections: int) -> Network:
    like = None
    points = POINTS
    if reflections != 128:
        like = f"cwy-128-{nonlinearity}"
        points = 0
    return Network(
        f"cwy-{reflections}-{nonlinearity}",
        "cwy",
        (f"nonlinearity={nonlinearity}", f"reflections={reflections}"),
        points=points,
        like=like,
    )


BASELINES = (
    Network("lstm", "lstm"),
    Network("gru", "gru"),
    Network("rnn-tanh", "rnn", ("nonlinearity=tanh",)),
    Network("rnn-relu", "rnn", ("nonlinearity=relu",)),
)
ORTHOGONAL = tuple(_cwy(f, 128) for f in ("abs", "relu", "leaky_relu", "modrelu", "tanh"))
LENGTHS = tuple(
    _cwy(f, length) for f in ("relu", "leaky_relu", "abs") for length in (64, 256, 512, 1024)
)
RIVALS = (
    # Steps of the first two take several times as long, so they have half of the points. All
    # three have one seed.
    Network("scornn-relu", "scornn", ("nonlinearity=relu",), points=POINTS // 2, seeds=(0,)),
    Network("exprnn-relu", "exprnn", ("nonlinearity=relu",), points=POINTS // 2, seeds=(0,)),
    # Gradient descent takes longer steps than Adam.
    Network("rgd-relu", "rgd", ("nonlinearity=relu",), seeds=(0,), step=100.0),
)
REGULAR = ("dropout=0.3",)
GAP = (
    Network("lstm-dropout", "lstm", REGULAR, points=0, like="lstm"),
    Network("gru-dropout", "gru", REGULAR, points=0, like="gru"),
    Network(
        "rnn-tanh-dropout",
        "rnn",
        ("nonlinearity=tanh", *REGULAR),
        points=0,
        like="rnn-tanh",
        seeds=(0,),
    ),
    Network(
        "cwy-512-relu-dropout",
        "cwy",
        ("nonlinearity=relu", "reflections=512", *REGULAR),
        points=0,
        like="cwy-128-relu",
    ),
    Network(
        "cwy-128-relu-gate-dropout",
        "cwy",
        ("nonlinearity=relu", "reflections=128", "gate=true", *REGULAR),
    ),
)
"""Networks that may come close to the LSTM, with dropout for all alike.

Dropout takes the point without it. The gate is a network of its own, with a search of its own.
"""


def _gated(nonlinearity: str, reflections: int, kind: str, *settings: str) -> Network:
    """Return a network with a gate of some kind."""
    plain = _cwy(nonlinearity, reflections)
    every = (*plain.settings, "gate=true", *settings)
    return Network(f"{plain.name}-{kind}", "cwy", every, points=0)


THIN = "thin_gate=true"
DECAYED = (
    *BASELINES[:3],
    _cwy("relu", 512),
    _cwy("relu", 256),
    _cwy("relu", 128),
    _cwy("relu", 64),
    replace(_cwy("tanh", 256), like=None),
    _gated("relu", 256, "gate"),
    _gated("tanh", 256, "gate"),
    _gated("relu", 256, "gate-decoder", "gate_encoder=false"),
    _gated("tanh", 256, "gate-decoder", "gate_encoder=false"),
    _gated("tanh", 512, "gate-thin", THIN),
    _gated("tanh", 256, "gate-thin", THIN),
    _gated("tanh", 128, "gate-thin", THIN),
)
"""The networks of the stage with a learning rate that decays. The gated ones have no search."""
GROUPS = {
    "baselines": BASELINES,
    "orthogonal": ORTHOGONAL,
    "lengths": LENGTHS,
    "rivals": RIVALS,
    "gap": GAP,
    "decay": DECAYED,
}
NETWORKS = tuple(dict.fromkeys(network for group in GROUPS.values() for network in group))
GATES: dict[str, tuple[str, ...]] = {
    "none": ("gate=false", "thin_gate=false"),
    "matrices": ("gate=true", "thin_gate=false"),
    "matrices-decoder": ("gate=true", "thin_gate=false", "gate_encoder=false"),
    "thin": ("gate=true", THIN),
    "thin-decoder": ("gate=true", THIN, "gate_encoder=false"),
}
"""Forms of a gate, as settings of ``nmt/small``."""

SMALL = "embedding_scale=0.05"
WARM = "warmup=1000"
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


def point(number: int, network: Network) -> tuple[str, ...]:
    """Return a point of the search, as settings. It is the same for every network."""
    drawn = torch.quasirandom.SobolEngine(len(SPACE), scramble=True, seed=0).draw(number + 1)
    found = []
    for (name, (low, high)), part in zip(SPACE.items(), drawn[-1].tolist(), strict=True):
        value = low * math.exp(part * math.log(high / low))
        if name == "orthogonal_lr":
            value *= network.step
        found.append(f"{name}={value:.3g}")
    return tuple(found)


def trials(networks: Iterable[Network]) -> list[Planned]:
    """Return the runs of the search. All networks come with one point before the next."""
    return [
        _trial(network, number)
        for number in range(POINTS)
        for network in networks
        if number < network.points
    ]


def _trial(network: Network, number: int) -> Planned:
    return Planned(
        f"tuning/{network.name}-{number}",
        "nmt/paper",
        network.method,
        SEEDS[0],
        (
            *network.settings,
            *point(number, network),
            HELD_OUT,
            UNTESTED,
            "epochs=2",
            *QUIET,
        ),
    )


def lowest(record: dict[str, Any] | None) -> float:
    """Return the lowest validation loss of a run, infinite if it did not finish."""
    if record is None:
        return math.inf
    return record["best"]["value"]


def chosen(out: Path, networks: Iterable[Network]) -> dict[str, int]:
    """Return the number of the best point of each network that has finished runs."""
    found = {}
    for network in networks:
        losses = {
            number: lowest(read(out, _trial(network, number))) for number in range(network.points)
        }
        finished = {number: loss for number, loss in losses.items() if math.isfinite(loss)}
        if finished:
            found[network.name] = min(finished, key=finished.__getitem__)
    return found


def finals(
    networks: Iterable[Network], points: dict[str, int], seeds: Sequence[int]
) -> list[Planned]:
    """Return the final runs. All networks come with one seed before the next."""
    runs = []
    for seed in seeds:
        for network in networks:
            number = points.get(network.like or network.name)
            if seed not in network.seeds or number is None:
                continue
            start = point(number, network)
            runs.append(_trained(f"tuned-{network.name}", network, start, seed))
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
                settings = (*settings, PATIENCE)
            folder = f"rate/{name}-{network.name}-epochs{epochs}"
            runs.append(Planned(folder, "nmt/paper", network.method, SEEDS[0], settings))
    return runs


def starts() -> list[Planned]:
    """Return the runs that show what the scale of the embeddings does. All else is the same."""
    runs = []
    for network in (BASELINES[0], *ORTHOGONAL[:2]):
        for scale in SCALES:
            start = (f"embedding_scale={scale}", "lr=1e-3", "orthogonal_lr=1e-3")
            settings = (*network.settings, *start, HELD_OUT, UNTESTED, "epochs=3", *QUIET)
            folder = f"start/{network.name}-{scale}"
            runs.append(Planned(folder, "nmt/paper", network.method, SEEDS[0], settings))
    return runs


def commons(seeds: Sequence[int]) -> list[Planned]:
    """Return the runs at one point for all networks, with dropout and without."""
    networks = (BASELINES[0], BASELINES[1], _cwy("relu", 512))
    variants = {"": COMMON, "-dropout": (*COMMON, *REGULAR)}
    return [
        _trained(f"common-{network.name}{ending}", network, start, seed)
        for seed in seeds
        for network in networks
        for ending, start in variants.items()
    ]


def decays(
    networks: Iterable[Network], dropouts: Iterable[float], seeds: Sequence[int]
) -> list[Planned]:
    """Return the runs with a learning rate that decays, one for all networks."""
    return [
        _trained(
            f"decay-{network.name}-dropout{dropout}",
            network,
            (*DECAYING, f"dropout={dropout}"),
            seed,
        )
        for seed in seeds
        for dropout in dropouts
        for network in networks
        if network in DECAYED
    ]


def _trained(name: str, network: Network, start: Iterable[str], seed: int) -> Planned:
    """Return a run of up to ten epochs whose best epoch is tested."""
    settings = (*network.settings, *start, HELD_OUT, PATIENCE, *QUIET)
    return Planned(f"nmt/{name}-seed{seed}", "nmt/paper", network.method, seed, settings)


def gates(seeds: Iterable[int]) -> list[Planned]:
    """Return the runs of small networks with each form of a gate, without a test."""
    return [
        Planned(
            f"gate/{name}-{nonlinearity}-seed{seed}",
            "nmt/small",
            "cwy",
            seed,
            (f"nonlinearity={nonlinearity}", *settings, HELD_OUT, UNTESTED, *QUIET),
        )
        for seed in seeds
        for nonlinearity in ("tanh", "relu")
        for name, settings in GATES.items()
    ]


def planned(
    stage: str,
    out: Path,
    networks: Sequence[Network],
    seeds: Sequence[int],
    names: Sequence[str],
    dropouts: Sequence[float],
) -> list[Planned]:
    """Return the runs of a stage.

    Args:
        stage: its name.
        out: the folder of the sweep, with the runs of the search.
        networks, seeds: which to train.
        names: the rescues of the stage "best-rate".
        dropouts: of the stage "decay".
    """
    if stage == "tune":
        return trials(networks)
    if stage == "rate":
        return rescues(RESCUES, epochs=3)
    if stage == "best-rate":
        return rescues(names, EPOCHS)
    if stage == "start":
        return starts()
    if stage == "common":
        return commons(seeds)
    if stage == "decay":
        return decays(networks, dropouts, seeds)
    if stage == "gate":
        return gates(seeds)
    return finals(networks, chosen(out, NETWORKS), seeds)


def select(names: str) -> tuple[Network, ...]:
    """Return networks by their names or those of their groups, separated by commas."""
    found: list[Network] = []
    for name in names.split(","):
        if name in GROUPS:
            found += GROUPS[name]
            continue
        choose("network", name, [network.name for network in NETWORKS])
        found += [network for network in NETWORKS if network.name == name]
    return tuple(dict.fromkeys(found))


def _each(convert: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return what reads an argument that is a list, separated by commas."""

    def read_all(text: str) -> list[Any]:
        try:
            return [convert(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_all


def named_networks(text: str) -> tuple[Network, ...]:
    """Read an argument that names networks or groups, separated by commas."""
    try:
        return select(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}.")
    return Path(text)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("out", type=Path, help="the folder of all stages")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--precision", default="float32", help="float32, bfloat16 or float64")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after this")
    parser.add_argument(
        "--stop", type=float, default=1e9, help="save and stop runs after these seconds"
    )
    parser.add_argument(
        "--networks",
        type=named_networks,
        default=",".join(GROUPS),
        help="names or groups, for tune, final and decay",
    )
    parser.add_argument(
        "--seeds", type=_each(int), default="0,1,2", help="for final, common, decay and gate"
    )
    parser.add_argument(
        "--rescues",
        type=_each(lambda name: choose("rescue", name, RESCUES)),
        default="small-warm-clip,all",
        help="for best-rate",
    )
    parser.add_argument("--dropouts", type=_each(float), default=DROPOUTS, help="for decay")
    parser.add_argument(
        "--set", action="append", default=[], help="key=value, for every run, repeated"
    )
    parser.add_argument(
        "--known", type=_file, action="append", default=[], help="records of a sweep, repeated"
    )
    return parser


def main() -> None:
    """Run a stage."""
    parser = _arguments()
    given = parser.parse_args()
    try:
        check_device(given.device)
    except ConfigError as error:
        parser.error(str(error))
    for path in given.known:
        restore(given.out, path.read_text().splitlines())
    runs = [
        replace(run, settings=(*run.settings, *given.set))
        for run in planned(
            given.stage, given.out, given.networks, given.seeds, given.rescues, given.dropouts
        )
    ]
    if not runs:
        reason = f"the stage {given.stage} has no run of these networks and seeds."
        if given.stage == "final":
            reason += " It needs the runs of tune, in the same folder or by --known."
        parser.error(reason)
    now = time.time()
    place = Place(given.out, given.device, given.precision, now + given.seconds, now + given.stop)
    failures = 0
    for line in train(runs, place, given.processes):
        print(line, flush=True)
        if ": failed" in line:
            failures += 1
    merge(given.out / f"{given.stage}.jsonl", lines(given.out, runs))
    if failures:
        sys.exit(f"runs that failed: {failures}. Their logs are in {given.out}.")


if __name__ == "__main__":
    main()
