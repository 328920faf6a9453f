"""Report Copying: the loss against a model without memory, and when it falls below a level."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..report.describe import Baseline, Column, Config, Curve, Description, Series, crossing_column
from ..report.runs import Run
from ..report.words import number, say

# Figures 1a and 4a of the paper, T = 1000 and 2000, N = 190.
PAPER = {
    "cwy": "goes to zero, the fastest",
    "exprnn": "goes to zero",
    "dtriv": "goes to zero",
    "scornn": "does not go to zero",
    "lstm": "never beats the baseline",
}


def baseline(config: Config) -> float:
    """Return the loss of a model that knows everything but the ten symbols."""
    return 10 * math.log(8) / (config["T"] + 20)


def _gain(run: Run) -> float | None:
    """Return how many times the test loss is below the baseline."""
    loss = run.last("test", "loss")
    if loss is None:
        return None
    if loss == 0:
        return math.inf
    return baseline(run.config) / loss


def _gain_text(gain: float) -> str:
    if gain >= 10:
        return f"{gain:,.0f}"
    return f"{gain:.2f}"


def finding(series: Sequence[Series]) -> str:
    """Name who learns the task, who beats the baseline and who does not, by the worst seed."""
    gains = {one.label: min(_gain(run) or 0 for run in one.runs) for one in series}
    learn = [one for one in series if gains[one.label] > 10]
    better = [one for one in series if 1.02 < gains[one.label] <= 10]
    rest = [one for one in series if gains[one.label] <= 1.02]
    clauses = []
    if learn:
        clauses.append(f"{say(learn, series, 'learns', 'learn')} to recall the symbols")
    if better:
        clauses.append(f"{say(better, series, 'gets', 'get')} under the no-memory baseline")
    if rest:
        clause = say(rest, series, "does not", "do not")
        if not better:
            clause += " beat the no-memory baseline"
        clauses.append(clause)
    return ". ".join(clauses)


def _published(config: Config) -> str | None:
    full_rank = config.get("reflections") in (None, config["hidden_size"])
    if config["T"] in (1000, 2000) and config["hidden_size"] == 190 and full_rank:
        return PAPER.get(config["method"])
    return None


DESCRIPTIONS = {
    "copying": Description(
        title="Copying",
        panels={"T": "T"},
        about="Ten symbols are shown, then T blanks, then a cue to write the symbols down. "
        "A model that remembers nothing can do no better than the baseline, 10 ln 8/(T + 20). "
        "The paper: CWY goes to zero, faster than exprnn and dtriv. scornn does not get there, "
        "and the LSTM never beats the baseline.",
        curves=(
            Curve(
                "loss",
                "loss",
                "training cross-entropy, nats per position",
                scale="log",
                baseline=Baseline("no memory", baseline),
            ),
        ),
        columns=(
            Column("held-out loss", lambda run: run.last("test", "loss"), number),
            Column("baseline / held-out loss", _gain, _gain_text),
            Column(
                "symbols recalled",
                lambda run: run.last("test", "accuracy"),
                lambda share: f"{share:.1%}",
            ),
            crossing_column(0.01),
            crossing_column(0.001),
        ),
        finding=finding,
        published=_published,
    )
}
