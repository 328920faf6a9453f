"""How pixel-by-pixel MNIST is reported: test accuracy, at the end and at its best, beside what was published."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean

from ..report.describe import Baseline, Column, Config, Curve, Description, Series
from ..report.words import percent

# Test accuracy, plain and permuted. expRNN and scoRNN: Lezcano-Casado and Martínez-Rubio 2019, Helfrich et al. 2018.
PUBLISHED = {
    ("exprnn", 170): (98.0, 94.9),
    ("exprnn", 360): (98.4, 96.2),
    ("exprnn", 512): (98.7, 96.6),
    ("scornn", 170): (97.2, 94.8),
}


def _finding(series: Sequence[Series]) -> str:
    ends = [
        (mean(run.last("test", "accuracy") or 0.0 for run in one.runs), one.label) for one in series
    ]
    return (
        ", ".join(f"{label} {percent(value)}" for value, label in sorted(ends, reverse=True))
        + " test accuracy"
    )


def _published(permuted: bool, config: Config) -> str | None:
    size = config["hidden_size"]
    if (config["method"], size) in PUBLISHED:
        return f"{PUBLISHED[config['method'], size][permuted]}%"
    return "above 95%" if config["method"] == "cwy" and size == 170 and not permuted else None


def _description(title: str, about: str, permuted: bool) -> Description:
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
                "cross-entropy, nats (training)",
                along="epoch",
                along_label="epoch",
                scale="log",
                baseline=Baseline("chance", lambda config: math.log(10)),
            ),
        ),
        columns=(
            Column("final test accuracy", lambda run: run.last("test", "accuracy"), percent),
            Column("best test accuracy", lambda run: run.best("test", "accuracy"), percent),
        ),
        finding=_finding,
        published=lambda config: _published(permuted, config),
    )


ABOUT = "The 784 pixels of a digit are read one by one, and its class is told from the last state."
DESCRIPTIONS = {
    "mnist": _description(
        "Pixel-by-pixel MNIST", f"{ABOUT} The paper: CWY above 95%, as good as HR.", permuted=False
    ),
    "pmnist": _description(
        "Permuted MNIST",
        f"{ABOUT} The pixels come in one random order, the same for all.",
        permuted=True,
    ),
}
