"""Report pixel-by-pixel MNIST: final and best test accuracy, next to published values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import mean
from typing import NamedTuple

from ..report.describe import Baseline, Column, Config, Curve, Description, Series
from ..report.words import percent


class Accuracy(NamedTuple):
    """Hold published test accuracies in percent."""

    plain: float
    permuted: float


# By method and N. expRNN: Lezcano-Casado and Martínez-Rubio 2019. scoRNN: Helfrich et al. 2018.
PUBLISHED = {
    ("exprnn", 170): Accuracy(plain=98.0, permuted=94.9),
    ("exprnn", 360): Accuracy(plain=98.4, permuted=96.2),
    ("exprnn", 512): Accuracy(plain=98.7, permuted=96.6),
    ("scornn", 170): Accuracy(plain=97.2, permuted=94.8),
}


def _finding(series: Sequence[Series]) -> str:
    ends = []
    for one in series:
        accuracy = mean(run.last("test", "accuracy") or 0.0 for run in one.runs)
        ends.append((accuracy, one.label))
    ranked = [f"{label} {percent(accuracy)}" for accuracy, label in sorted(ends, reverse=True)]
    return f"{', '.join(ranked)} test accuracy"


def _published_plain(config: Config) -> str | None:
    method, size = config["method"], config["hidden_size"]
    if (method, size) == ("cwy", 170):
        return "above 95%"
    if (method, size) not in PUBLISHED:
        return None
    return f"{PUBLISHED[method, size].plain}%"


def _published_permuted(config: Config) -> str | None:
    method, size = config["method"], config["hidden_size"]
    if (method, size) not in PUBLISHED:
        return None
    return f"{PUBLISHED[method, size].permuted}%"


def _description(title: str, about: str, published: Callable[[Config], str | None]) -> Description:
    return Description(
        title=title,
        panels={"hidden_size": "N"},
        about=about,
        curves=(
            Curve(
                "accuracy",
                "accuracy",
                "test accuracy",
                split="test",
                along="epoch",
                along_label="epoch",
                scale="logit",
                baseline=Baseline("chance", lambda config: 0.1, "{:.0%}".format),
            ),
            Curve(
                "loss",
                "loss",
                "training cross-entropy, nats",
                along="epoch",
                along_label="epoch",
                scale="log",
                baseline=Baseline("chance", lambda config: math.log(10)),
            ),
        ),
        columns=(
            Column("test accuracy at the end", lambda run: run.last("test", "accuracy"), percent),
            Column("best test evaluation", lambda run: run.best("test", "accuracy"), percent),
        ),
        finding=_finding,
        published=published,
    )


ABOUT = "A network reads the 784 pixels of a digit one by one and classifies it by its last state."
DESCRIPTIONS = {
    "mnist": _description(
        "Pixel-by-pixel MNIST",
        f"{ABOUT} The paper: CWY above 95%, as good as HR.",
        _published_plain,
    ),
    "pmnist": _description(
        "Permuted MNIST",
        f"{ABOUT} The pixels come in one random order, the same for all.",
        _published_permuted,
    ),
}
