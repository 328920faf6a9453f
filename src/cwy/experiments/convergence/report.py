"""How the convergence task is reported: the slope of the smallest gradient in log-log, beside the theorem's -0.5."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import linear_regression, mean, stdev
from typing import TYPE_CHECKING, Any

from ..report.describe import Baseline, Column, Curve, Description, Series
from ..report.runs import Run
from ..report.words import listed, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

THEOREM = -0.5
# A relative rounding error of a norm in float64, with room.
ROUNDING = 1e-14
PIECES = 5


def slope(run: Run) -> tuple[float, float] | None:
    """The slope over the last decade of K by least squares; its error is the standard error over fifths of the decade."""
    steps, values = run.curve("test", "minimum")
    points = [
        (math.log(k), math.log(v))
        for k, v in zip(steps, values, strict=True)
        if 10 * k >= steps[-1]
    ]
    if len(points) < 2 * PIECES:
        return None
    # One point in each of fifty equal parts of log K: the late steps, which are many, do not outweigh the others.
    width = (points[-1][0] - points[0][0]) / 50
    thinned = list({int((x - points[0][0]) / width): (x, y) for x, y in points}.values())
    fitted = linear_regression(*zip(*thinned, strict=True)).slope
    cuts = [thinned[round(i * (len(thinned) - 1) / PIECES)] for i in range(PIECES + 1)]
    parts = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(cuts)]
    return fitted, stdev(parts) / math.sqrt(PIECES)


def _lines(axes: Axes, series: Sequence[Series]) -> None:
    """The fitted slope along the last decade of each curve, and the theorem's from where that begins."""
    for one in series:
        fitted = [run for run in one.runs if slope(run)]
        if not fitted:
            continue
        fits = [fit for run in fitted if (fit := slope(run))]
        steps, _ = fitted[0].curve("test", "minimum")
        ends = steps[-1] / 10, steps[-1]
        last = math.exp(mean(math.log(run.curve("test", "minimum")[1][-1]) for run in fitted))
        first = last * 10 ** -mean(fit[0] for fit in fits)
        style: dict[str, Any] = {"color": axes.spines["left"].get_edgecolor(), "linewidth": 1.4}
        axes.plot(
            ends,
            (first, last),
            linestyle=(0, (1, 1)),
            label=f"fit of {one.label}: slope {_told(one)}",
            **style,
        )
        theorem = "theorem: slope −0.5" if one is series[-1] else None
        axes.plot(
            ends,
            (1.3 * first, 1.3 * first * 10**THEOREM),
            linestyle=(0, (4, 3)),
            label=theorem,
            **style,
        )


def _told(one: Series) -> str:
    rate, error = _over_seeds(one)
    return f"{rate:.2f} ± {error:.2f}".replace("-", "−")


def _over_seeds(one: Series) -> tuple[float, float]:
    """The mean slope over seeds and its standard error, from the spread over seeds or that of the fits, the larger."""
    rates, errors = zip(*(fit for run in one.runs if (fit := slope(run))), strict=True)
    spread = stdev(rates) if len(rates) > 1 else 0.0
    return mean(rates), max(spread, mean(errors)) / math.sqrt(len(rates))


def _finding(series: Sequence[Series]) -> str:
    fitted = [one for one in series if all(slope(run) for run in one.runs)]
    growths = (
        growth
        for one in series
        for run in one.runs
        if (growth := run.last("test", "growth")) is not None
    )
    kept = min(growths) >= -ROUNDING
    norms = "no vector ever gets shorter" if kept else "some vector GETS SHORTER"
    if not fitted:
        return f"too short to fit a slope; {norms}"
    slopes = listed([f"{_told(one)} ({one.label})" for one in fitted])
    holds = all(rate <= THEOREM + error for rate, error in map(_over_seeds, fitted))
    verdict = (
        "as fast as the theorem's −0.5 or faster" if holds else "NOT as fast as the theorem's −0.5"
    )
    return f"the squared gradient falls with slope {slopes}, {verdict}; {norms}"


def _slope(part: int):
    return lambda run: (slope(run) or (None, None))[part]


DESCRIPTIONS = {
    "convergence": Description(
        title="Convergence",
        about="Stochastic gradient descent with step k^−0.5 on a smooth random objective over O(N) (cwy) and St(N, M) "
        "(tcwy), from one start, with independent noise in each replica. Theorem 4: the smallest expected squared "
        "gradient so far is o(K^(−0.5+ε)); its proof: the norms of the vectors never decrease. Slopes are fitted in log-log "
        "over the last decade of K.",
        curves=(
            Curve(
                "gradient",
                "minimum",
                "min over k < K of E‖∇f‖²",
                split="test",
                along_label="iterations K",
                scale="log",
                along_scale="log",
                overlay=_lines,
            ),
            Curve(
                "norm",
                "norm",
                "norm of the shortest vector",
                split="test",
                along_label="iterations K",
                along_scale="log",
                baseline=Baseline("start", lambda config: 1.0),
            ),
        ),
        columns=(
            Column("slope", _slope(0), lambda value: f"{value:.3f}"),
            Column("its standard error", _slope(1), lambda value: f"{value:.3f}"),
            Column("smallest E‖∇f‖²", lambda run: run.last("test", "minimum"), number),
            Column(
                "smallest growth of a norm in a step",
                lambda run: run.last("test", "growth"),
                number,
            ),
        ),
        finding=_finding,
        published=lambda config: "slope at most −0.5",
    )
}
