"""Report translation: the loss per word, the measures of the paper's tables, BLEU, the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean
from typing import NamedTuple

from ..report.describe import Column, Config, Curve, Description, Series
from ..report.runs import Run
from ..report.words import duration, listed
from .recipes import paper


class Published(NamedTuple):
    """Hold a row of the paper's Tables 3 and 5.

    Attributes:
        perplexity: 2^loss on the test part.
        loss: cross-entropy and its standard error, if given.
        minutes: time of 10 epochs.
        parameters: in millions.
    """

    perplexity: float
    loss: str | None
    minutes: int
    parameters: int

    def __str__(self) -> str:
        parts = [f"perplexity {self.perplexity}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss}")
        parts += [f"{self.minutes} min on a TPU", f"≈ {self.parameters} M parameters"]
        return ", ".join(parts)


PAPER = {
    "rnn": Published(1.66, "0.74 ± .08", 148, 25),
    "gru": Published(1.47, "0.56 ± .05", 173, 32),
    "lstm": Published(1.46, "0.55 ± .05", 232, 37),
    "scornn": Published(1.49, None, 1780, 25),
    "rgd": Published(4.03, "2.01 ± .14", 1780, 25),
    "exprnn": Published(1.51, None, 2960, 25),
    "cwy-1024": Published(1.47, "0.56 ± .03", 1111, 25),
    "cwy-512": Published(1.58, "0.66 ± .03", 338, 24),
    "cwy-256": Published(1.56, "0.64 ± .06", 213, 23),
    "cwy-128": Published(1.41, "0.50 ± .01", 198, 23),
    "cwy-64": Published(1.52, "0.60 ± .01", 175, 23),
}

LIKE = (
    "hidden_size",
    "embedding_size",
    "batch_size",
    "optimizer",
    "init",
    "nonlinearity",
    "file",
    "columns",
    "pairs",
    "validation",
    "min_count",
    "embedding_scale",
    "input_scale",
    "input_bias",
    "zero_readout",
    "gate",
    "dropout",
    "clip",
    "warmup",
)
"""Settings that must equal the paper's for a comparison. Epochs and learning rates may differ."""
SHOWN = 4
"""Methods that the headline names."""


def epoch_seconds(run: Run) -> float | None:
    """Return the training time divided by the epochs done."""
    epochs = run.curve("train", "epoch")[1]
    if not epochs:
        return None
    return run.seconds / epochs[-1]


def _tested(metric: str) -> Callable[[Run], float | None]:
    """Return a function that reads a metric of the test pairs, or else of validation pairs."""

    def value(run: Run) -> float | None:
        found = run.last("test", metric)
        if found is None:
            return _at_best_epoch(run, metric)
        return found

    return value


def _at_best_epoch(run: Run, metric: str) -> float | None:
    """Return a metric of the validation pairs, at the epoch with the lowest loss on these."""
    if run.is_only_recorded:
        return run.recorded_at_best("validation", metric)
    _, losses = run.curve("validation", "loss")
    _, values = run.curve("validation", metric)
    if not values or len(losses) != len(values):
        return None
    return values[losses.index(min(losses))]


def _finding(series: Sequence[Series]) -> str:
    loss_of = _tested("loss")
    ranked = []
    for one in series:
        losses = [loss_of(run) for run in one.runs]
        known = [loss for loss in losses if loss is not None]
        if known:
            ranked.append((mean(known), one.method, one.label))
    # The best setting of each method, and no more than fit a headline.
    best: dict[str, str] = {}
    for loss, method, label in sorted(ranked):
        best.setdefault(method, f"{label} {loss:.3f}")
    if not best:
        return "not evaluated yet"
    return f"{listed(list(best.values())[:SHOWN])} nats per word"


def _published(config: Config) -> str | None:
    theirs = paper(config["method"]).to_dict()
    if any(config.get(name, theirs[name]) != theirs[name] for name in LIKE):
        return None
    row = PAPER.get(_name_in_paper(config))
    if row is None:
        return None
    return str(row)


def _name_in_paper(config: Config) -> str:
    method = config["method"]
    if method == "cwy":
        return f"cwy-{config['reflections'] or 1024}"
    if method.startswith("rgd-"):
        return "rgd"
    return method


def _parameters(run: Run) -> float | None:
    if not run.record:
        return None
    return run.record["parameters"] / 1e6


def _over_epochs(split: str, name: str) -> Curve:
    return Curve(
        split,
        "loss",
        f"{name} cross-entropy, nats per word",
        split=split,
        along="epoch",
        along_label="epoch",
        scale="log",
    )


DESCRIPTIONS = {
    "nmt": Description(
        title="Translation",
        panels={
            "hidden_size": "N",
            "epochs": "epochs",
            "validation": "validation",
            "dropout": "dropout",
            "warmup": "warm-up",
        },
        parts={"gate_encoder": "gate", "thin_gate": "gate"},
        about="Sentences are translated by an encoder and a decoder with additive attention: "
        "Tatoeba's from Spanish into English, unless the settings name a file. "
        "Loss and perplexity are per word, in nats, with the words before given. "
        "As we read the paper's tables, its loss is a mean over targets padded to the longest of "
        "the corpus, and its perplexity is 2^loss. The table has both. "
        "BLEU is of greedy translations, lower-case and without accents. "
        "All numbers are on test pairs: from the end of training, or, if there are validation "
        "pairs, from the epoch with the lowest loss on these. Runs that were not tested show "
        "their validation pairs at that epoch. "
        "The energy is the share of the decoder states' energy along their principal direction, "
        "on validation pairs if there are any. "
        "The published ones are of ten epochs at a learning rate of 1e-2.",
        curves=(
            _over_epochs("test", "test"),
            _over_epochs("validation", "validation"),
            _over_epochs("train", "training"),
        ),
        columns=(
            Column("loss per word", _tested("loss"), "{:.3f}".format),
            Column("perplexity", _tested("perplexity"), "{:.4g}".format),
            Column("loss as the paper counts", _tested("paper_loss"), "{:.3f}".format),
            Column("perplexity as the paper counts", _tested("paper_perplexity"), "{:.4g}".format),
            Column("BLEU", _tested("bleu"), "{:.1f}".format),
            Column("energy in one direction", _tested("principal_share"), "{:.2f}".format),
            Column("parameters, M", _parameters, "{:.3g}".format),
            Column("time per epoch", epoch_seconds, duration),
            Column("time per epoch / LSTM's", epoch_seconds, "{:.2f}".format, against="lstm"),
        ),
        finding=_finding,
        published=_published,
    )
}
