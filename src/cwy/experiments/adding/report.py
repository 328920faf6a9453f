"""Report the adding problem: the squared error against that of the constant answer 1."""

from __future__ import annotations

from collections.abc import Sequence

from ..report.describe import Baseline, Column, Curve, Description, Series, crossing_column
from ..report.words import number, say

# The variance of the sum of two numbers uniform in [0, 1].
BASELINE = 1 / 6


def _finding(series: Sequence[Series]) -> str:
    learn = [one for one in series if _worst_loss(one) < BASELINE / 10]
    rest = [one for one in series if one not in learn]
    clauses = []
    if learn:
        clauses.append(f"{say(learn, series, 'learns', 'learn')} to add")
    if rest:
        clause = say(rest, series, "does not", "do not")
        if not learn:
            clause += " learn to add"
        clauses.append(clause)
    return ", ".join(clauses)


def _worst_loss(one: Series) -> float:
    return max(run.last("train", "loss") or 1 for run in one.runs)


DESCRIPTIONS = {
    "adding": Description(
        title="Adding",
        panels={"T": "T"},
        about="Two of T numbers, uniform in [0, 1], are marked, and the answer is their sum. "
        "The constant answer 1 has a mean squared error of 1/6. The paper does not have this task.",
        curves=(
            Curve(
                "loss",
                "loss",
                "mean squared error (training)",
                scale="log",
                baseline=Baseline("always 1", lambda _: BASELINE),
            ),
        ),
        columns=(
            Column("final training loss", lambda run: run.last("train", "loss"), number),
            Column(
                "answers within 0.04",
                lambda run: run.last("test", "accuracy"),
                lambda share: f"{share:.1%}",
            ),
            crossing_column(0.01),
            crossing_column(0.001),
        ),
        finding=_finding,
    )
}
