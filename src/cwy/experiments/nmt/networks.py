"""The networks that the comparison of translation trains."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..engine.config import choose

SEEDS = (0, 1, 2)
SMALL_SEEDS = (3, 4, 5)
"""Of small networks. They are not those of the networks that the gate is chosen for.

With the same seed, all pairs that choose the gate would be among the pairs that test it.
"""
POINTS = 10
"""Points of a search."""
DROPOUT = "dropout=0.3"
THIN = "thin_gate=true"


@dataclass(frozen=True)
class Network:
    """Describe one network of the comparison.

    Attributes:
        name: of its runs.
        method: as ``cwy train`` takes it.
        settings: ``key=value`` texts that make it this network.
        points: how many points of a search it gets. 0 if it has no search of its own.
        like: the network whose point it takes, its own by default.
        seeds: of its final runs.
        orthogonal_factor: by which the searched orthogonal learning rate is multiplied.
    """

    name: str
    method: str
    settings: tuple[str, ...] = ()
    points: int = POINTS
    like: str | None = None
    seeds: tuple[int, ...] = SEEDS
    orthogonal_factor: float = 1.0


def cwy_network(nonlinearity: str, reflections: int) -> Network:
    """Return a network with CWY. Other numbers of reflections take the point of 128."""
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
ORTHOGONAL = tuple(cwy_network(f, 128) for f in ("abs", "relu", "leaky_relu", "modrelu", "tanh"))
OTHER_REFLECTIONS = tuple(
    cwy_network(f, count) for f in ("relu", "leaky_relu", "abs") for count in (64, 256, 512, 1024)
)
RIVALS = (
    # Steps of all three take about twice as long or more, so they have one seed. The first two have
    # half of the points.
    Network("scornn-relu", "scornn", ("nonlinearity=relu",), points=POINTS // 2, seeds=(0,)),
    Network("exprnn-relu", "exprnn", ("nonlinearity=relu",), points=POINTS // 2, seeds=(0,)),
    # Gradient descent takes longer steps than Adam.
    Network("rgd-relu", "rgd", ("nonlinearity=relu",), seeds=(0,), orthogonal_factor=100.0),
)
WITH_DROPOUT = (
    Network(
        "rnn-tanh-dropout",
        "rnn",
        ("nonlinearity=tanh", DROPOUT),
        points=0,
        like="rnn-tanh",
        seeds=(0,),
    ),
    Network(
        "cwy-128-relu-gate-dropout",
        "cwy",
        ("nonlinearity=relu", "reflections=128", "gate=true", DROPOUT),
    ),
)
"""Networks with dropout. The RNN takes the point without it, and the gate has its own."""


def _gated(nonlinearity: str, reflections: int, kind: str, *settings: str) -> Network:
    """Return a network with a gate of some kind."""
    plain = cwy_network(nonlinearity, reflections)
    every = (*plain.settings, "gate=true", *settings)
    return Network(f"{plain.name}-{kind}", "cwy", every, points=0)


DECAYED = (
    *BASELINES[:3],
    cwy_network("relu", 512),
    cwy_network("relu", 256),
    cwy_network("relu", 128),
    cwy_network("relu", 64),
    replace(cwy_network("tanh", 256), like=None),
    _gated("relu", 256, "gate"),
    _gated("tanh", 256, "gate"),
    _gated("relu", 256, "gate-decoder", "gate_encoder=false"),
    _gated("tanh", 256, "gate-decoder", "gate_encoder=false"),
    _gated("tanh", 512, "gate-thin", THIN),
    _gated("tanh", 256, "gate-thin", THIN),
    _gated("tanh", 128, "gate-thin", THIN),
    Network("rnn-tanh-gate-thin", "rnn", ("nonlinearity=tanh", "gate=true", THIN), points=0),
)
"""The networks of the stage with a learning rate that decays, at one point for all."""
CONTENDERS = (
    *BASELINES[:2],
    replace(_gated("tanh", 256, "gate-thin", THIN), points=POINTS),
    replace(_gated("tanh", 512, "gate-thin", THIN), like="cwy-256-tanh-gate-thin"),
)
"""The networks of the second search."""
SMALL = tuple(
    Network(
        f"{name}-tanh-gate-thin",
        method,
        ("nonlinearity=tanh", "gate=true", THIN),
        points=0,
        seeds=SMALL_SEEDS,
    )
    for name, method in (("small-cwy", "cwy"), ("small-free", "rnn"))
)
"""Small networks that differ only in their transition. It is orthogonal or free."""
SMALL_CONTENDERS = tuple(replace(network, points=POINTS) for network in SMALL)
"""The networks of the search of small ones."""
GROUPS = {
    "baselines": BASELINES,
    "orthogonal": ORTHOGONAL,
    "reflections": OTHER_REFLECTIONS,
    "rivals": RIVALS,
    "dropout": WITH_DROPOUT,
    "decay": DECAYED,
    "small": SMALL,
}
NETWORKS = tuple(dict.fromkeys(network for group in GROUPS.values() for network in group))


def named_as(networks: Iterable[Network], contenders: Iterable[Network]) -> list[Network]:
    """Return those of the contenders that have the names of these networks."""
    names = {network.name for network in networks}
    return [network for network in contenders if network.name in names]


def select(names: str) -> tuple[Network, ...]:
    """Return networks by their names or those of their groups, separated by commas."""
    found: list[Network] = []
    for name in names.split(","):
        if name in GROUPS:
            found += GROUPS[name]
            continue
        choose("network", name, [*GROUPS, *(network.name for network in NETWORKS)])
        found += [network for network in NETWORKS if network.name == name]
    return tuple(dict.fromkeys(found))
