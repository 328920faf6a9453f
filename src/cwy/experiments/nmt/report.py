"""How translation is reported: the loss a word, the paper's own measures beside its Tables 3 and 5, BLEU, and the time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import mean, median

from ..report.describe import Column, Config, Curve, Description, Series
from ..report.runs import Run
from ..report.words import duration, listed
from .recipes import paper

# Tables 3 and 5: test perplexity, 2^CE; cross-entropy and its standard error; minutes of 10 epochs; million parameters.
PAPER = {
    "rnn": (1.66, "0.74 ± .08", 148, 25),
    "gru": (1.47, "0.56 ± .05", 173, 32),
    "lstm": (1.46, "0.55 ± .05", 232, 37),
    "scornn": (1.49, None, 1780, 25),
    "rgd": (4.03, "2.01 ± .14", 1780, 25),
    "exprnn": (1.51, None, 2960, 25),
    ("cwy", 1024): (1.47, "0.56 ± .03", 1111, 25),
    ("cwy", 512): (1.58, "0.66 ± .03", 338, 24),
    ("cwy", 256): (1.56, "0.64 ± .06", 213, 23),
    ("cwy", 128): (1.41, "0.50 ± .01", 198, 23),
    ("cwy", 64): (1.52, "0.60 ± .01", 175, 23),
}

LIKE = (
    "hidden_size",
    "embedding_size",
    "batch_size",
    "nonlinearity",
    "file",
    "columns",
    "pairs",
    "validation",
)
"""Settings that must be the paper's for its numbers to stand beside a run; epochs and rates differ, and it is said."""
SHOWN = 4
"""Methods that the headline names."""


def epoch_seconds(run: Run) -> float | None:
    """The median over epochs; the first, which records graphs, counts only where it is alone."""
    ends = [0.0, *(row["seconds"] for row in run.metrics if row["split"] != "train")]
    times = [after - before for before, after in pairwise(ends)]
    return median(times[1:] or times) if times else None


def _last(metric: str):
    """Of the test part, or, where a rate is being chosen, of the validation part."""
    return lambda run: run.last(
        "test" if run.config["validation"] is None else "validation", metric
    )


def _finding(series: Sequence[Series]) -> str:
    losses = [
        (one, [v for run in one.runs if (v := _last("loss")(run)) is not None]) for one in series
    ]
    known = sorted((mean(values), one.method, one.label) for one, values in losses if values)
    # Of each method its best setting, and no more than fit a headline.
    best: dict[str, str] = {}
    for loss, method, label in known:
        best.setdefault(method, f"{label} {loss:.3f}")
    return f"{listed(list(best.values())[:SHOWN])} nats a word" if best else "not evaluated yet"


def _published(config: Config) -> str | None:
    theirs = paper(config["method"]).to_dict()
    if any(config[name] != theirs[name] for name in LIKE):
        return None
    method = config["method"]
    key = (
        (method, config["reflections"] or 1024)
        if method == "cwy"
        else "rgd"
        if method.startswith("rgd-")
        else method
    )
    if key not in PAPER:
        return None
    perplexity, loss, minutes, size = PAPER[key]
    told = [
        f"perplexity {perplexity}",
        *[f"loss {loss}"] * (loss is not None),
        f"{minutes} min on a TPU",
        f"≈ {size} M parameters",
    ]
    return ", ".join(told)


def _parameters(run: Run) -> float | None:
    return run.record["parameters"] / 1e6 if run.record else None


def _over_epochs(split: str, told: str) -> Curve:
    return Curve(
        split,
        "loss",
        f"cross-entropy, nats a word ({told})",
        split=split,
        along="epoch",
        along_label="epoch",
        scale="log",
    )


DESCRIPTIONS = {
    "nmt": Description(
        title="Translation",
        panels={"hidden_size": "N", "epochs": "epochs", "validation": "validation"},
        about="Sentences are translated by an encoder and a decoder with additive attention: Tatoeba's from Spanish into "
        "English, unless the settings name a file. Loss and perplexity are those of a word, in nats, with the words "
        "before given. As we read the paper's tables, its loss is a mean over targets padded to the longest of the "
        "corpus, and its perplexity 2^loss; both are given, too. BLEU is of greedy translations, lower-case and without "
        "accents. All at the end of training, on pairs that were not seen. What is published is of ten epochs at a rate "
        "of 1e-2.",
        curves=(
            _over_epochs("test", "test"),
            _over_epochs("validation", "validation"),
            _over_epochs("train", "training"),
        ),
        columns=(
            Column("loss a word", _last("loss"), "{:.3f}".format),
            Column("perplexity", _last("perplexity"), "{:.4g}".format),
            Column("loss as the paper's", _last("paper_loss"), "{:.3f}".format),
            Column("perplexity as the paper's", _last("paper_perplexity"), "{:.4g}".format),
            Column("BLEU", _last("bleu"), "{:.1f}".format),
            Column("parameters, M", _parameters, "{:.3g}".format),
            Column("time an epoch", epoch_seconds, duration),
            Column("the same over LSTM's", epoch_seconds, "{:.2f}".format, against="lstm"),
        ),
        finding=_finding,
        published=_published,
    )
}  # fmt: skip
