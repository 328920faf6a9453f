"""Named settings of translation: tuned ones, those of the paper, and a small one for a CPU.

Those of the paper begin with ``paper`` and are never edited.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Self

from ..engine.config import ConfigError
from ..engine.task import Recipe
from ..recurrent import BASELINES, RecurrentConfig, start

SCALES = {"least": 1e-6, "most": 1_000_000}
"""The range of a scale. Outside of it weights vanish or overflow."""


@dataclass(frozen=True)
class NmtConfig(RecurrentConfig):
    """Hold the settings of translation.

    Attributes:
        file: tab-separated pairs in UTF-8. None is Tatoeba, column 1 English and column 2 Spanish.
        columns: which column is translated into which.
        pairs: number of distinct pairs to use, drawn by the seed. None is all.
        validation: fraction of the training pairs to hold out. Epochs are then compared on these
            pairs, and the best one is tested at the end. None tests each epoch, and compares none.
        final_test: whether a run with validation pairs is tested at the end. Runs that choose a
            setting leave it out.
        min_count: how often a word must occur in the training pairs to be known. The others are
            one unknown word.
        embedding_size: features per word.
        embedding_scale: standard deviation of the initial embeddings.
        input_scale: factor of the initial input maps of encoder and decoder. In an LSTM and a GRU
            it scales the maps of the gates, too. The maps of the setting ``gate`` are not scaled.
        input_bias: whether the recurrences have a bias.
        zero_readout: whether the readout starts at zero.
        gate: whether a gate mixes each new state with the old one. For orthogonal methods and
            "rnn".
        gate_encoder: whether the encoder has the gate, too. Without it a kernel rolls it out.
        thin_gate: whether the gate reads only the word and, with one factor per unit, Q h. It is
            cheaper.
        dropout: fraction of embeddings and of the readout's inputs that are zeroed in training.
        epochs: passes over the training pairs.
        bucket: lengths are padded to multiples of this.
        test_batch_size: pairs per batch of an evaluation.
        eager: run training steps without CUDA graphs, for comparison.
    """

    file: str | None = None
    columns: str = field(default="2-1", metadata={"choices": ("2-1", "1-2")})
    pairs: int | None = None
    validation: float | None = field(default=None, metadata={"below": 1})
    final_test: bool = True
    min_count: int = 2
    embedding_size: int = 256
    embedding_scale: float = field(default=1.0, metadata=SCALES)
    input_scale: float = field(default=1.0, metadata=SCALES)
    input_bias: bool = True
    zero_readout: bool = False
    gate: bool = False
    gate_encoder: bool = True
    thin_gate: bool = False
    dropout: float | None = field(default=None, metadata={"below": 1})
    epochs: int = 10
    bucket: int = field(default=2, metadata={"most": 1000})
    test_batch_size: int = 512
    eager: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validation is None and self.patience is not None:
            raise ConfigError(
                "patience compares epochs on validation pairs, and there are none. Add "
                "validation=0.1, or set patience=none."
            )
        if self.validation is None and not self.final_test:
            raise ConfigError(
                "final_test=false leaves only validation pairs to evaluate, and there are none. "
                "Add validation=0.1, or leave final_test out."
            )
        changed = self.thin_gate or not self.gate_encoder
        if changed and not self.gate:
            raise ConfigError(
                "gate_encoder and thin_gate are settings of the gate, which this network does "
                "not have. Set thin_gate=false and gate_encoder=true, or gate=true for an "
                "orthogonal method or rnn."
            )
        if self.file == "":
            raise ConfigError("file must be the path of a file, or none for Tatoeba, got ''.")
        if self.nonlinearity == "modrelu" and not self.input_bias:
            raise ConfigError(
                "input_bias can't be false for modrelu, whose threshold the bias is. "
                "Choose another nonlinearity."
            )

    def with_settings(self, assignments: Iterable[str]) -> Self:
        made = super().with_settings(assignments)
        if made.file is None:
            return made
        # The run may be resumed from another folder. An unknown home stays as it is.
        return replace(made, file=os.path.abspath(os.path.expanduser(made.file)))


def paper(method: str, reflections: int | None = None) -> NmtConfig:
    """Return the paper's settings: N = 1024, batch 64, abs, a random initial Q.

    Adam takes 10 epochs at 1e-2 for all parameters.
    """
    return NmtConfig(
        hidden_size=1024,
        reflections=reflections,
        batch_size=64,
        optimizer="adam",
        lr=1e-2,
        orthogonal_lr=1e-2,
        log_every=50,
        save_every=1500,
        **start(method, "random", "abs"),
    )


@dataclass(frozen=True)
class Point:
    """Hold the settings that ``python -m cwy.experiments.nmt.sweep`` searches, and a warm-up."""

    lr: float
    orthogonal_lr: float
    embedding_scale: float
    input_scale: float
    warmup: int | None = None


DECAYING = Point(lr=2e-3, orthogonal_lr=2e-3, embedding_scale=0.2, input_scale=1.0, warmup=1000)
"""The point of the stage "decay". It was set before the second search."""
SEARCHED = {
    "rnn": Point(lr=4.34e-4, orthogonal_lr=1.05e-4, embedding_scale=0.823, input_scale=1.43),
    "scornn": Point(lr=1.03e-3, orthogonal_lr=1.53e-3, embedding_scale=0.17, input_scale=0.96),
    "exprnn": Point(lr=1.03e-3, orthogonal_lr=1.53e-3, embedding_scale=0.17, input_scale=0.96),
    "rgd": Point(lr=1.03e-3, orthogonal_lr=0.153, embedding_scale=0.17, input_scale=0.96),
}
"""The best points of the first search: of the RNN, which does not learn at the point above, and
of methods that were not trained there."""
DROPOUT = 0.3
"""In ten epochs it is better than 0.5 for the LSTM, ``cwy`` and ``cwy`` with a thin gate.

For the RNN it is better than none. For the others it was not compared.
"""
GRU_DROPOUT = 0.5
"""For the GRU it is better than 0.3."""


def _searched_name(method: str) -> str:
    """Return the method whose point another one takes. Gradient descent takes long steps."""
    if method.startswith("rgd-") and method != "rgd-adam":
        return "rgd"
    return method


def tuned(method: str, reflections: int | None = None) -> NmtConfig:
    """Return settings that train well: the paper's network with a tuned start, and dropout.

    Orthogonal networks have ReLU. For most methods the learning rate rises and then decays.

    A tenth of the training pairs chooses the epoch. Training ends when two epochs in a row are
    not better.
    """
    config = paper(method, reflections)
    if method not in BASELINES:
        config = replace(config, nonlinearity="relu")
    point = SEARCHED.get(_searched_name(method), DECAYING)
    dropout = DROPOUT
    if method == "gru":
        dropout = GRU_DROPOUT
    return replace(config, **asdict(point), dropout=dropout, validation=0.1, patience=2)


def gated(method: str, reflections: int | None = None) -> NmtConfig:
    """Return the tuned settings with tanh and a gate, for orthogonal networks."""
    config = tuned(method, reflections)
    return replace(config, nonlinearity="tanh", gate=True, thin_gate=True)


def small(method: str) -> NmtConfig:
    """Return settings for a CPU: a few minutes, for clear translations of short sentences.

    Orthogonal networks have a gate. The same number of steps learns more from more pairs.
    """
    orthogonal = method not in BASELINES
    return replace(
        paper(method),
        **start(method, "random", "tanh"),
        gate=orthogonal,
        thin_gate=orthogonal,
        hidden_size=128,
        embedding_size=64,
        embedding_scale=0.05,
        pairs=60_000,
        min_count=3,
        epochs=4,
        lr=1e-2,
        orthogonal_lr=3e-3,
        warmup=300,
        save_every=100,
        test_batch_size=128,
    )


REFLECTIONS = (1024, 512, 256, 128, 64)
"""The numbers of reflections in the paper."""
OTHERS = ("rnn", "gru", "lstm", "exprnn", "scornn", "rgd")
"""The paper's other networks."""

RECIPES: dict[str, Recipe] = {
    "tuned": tuned,
    **{f"cwy-{count}": partial(tuned, reflections=count) for count in REFLECTIONS},
    "cwy-512-gate": partial(gated, reflections=512),
    "cwy-256-gate": partial(gated, reflections=256),
    **dict.fromkeys(OTHERS, tuned),
    "paper": paper,
    **{f"paper-cwy-{count}": partial(paper, reflections=count) for count in REFLECTIONS},
    **{f"paper-{method}": paper for method in OTHERS},
    "small": small,
}
