"""Report the convergence task: the log-log slope of the smallest gradient, next to -0.5."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import linear_regression, mean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from ..report.describe import Baseline, Column, Curve, Description, Series
from ..report.runs import Run
from ..report.words import listed, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

THEOREM = -0.5
ROUNDING = 1e-14
"""A bound on the relative rounding error of a norm in float64."""
PIECES = 5


class Point(NamedTuple):
    """Hold a point of a curve in log-log."""

    x: float
    y: float


class Slope(NamedTuple):
    """Hold a fitted slope and its standard error."""

    value: float
    error: float


def slope(run: Run) -> Slope | None:
    """Fit the slope over the last decade of K by least squares.

    The error is the standard error over fifths of the decade.
    """
    steps, values = run.curve("test", "minimum")
    points = [
        Point(math.log(k), math.log(v))
        for k, v in zip(steps, values, strict=True)
        if 10 * k >= steps[-1]
    ]
    if len(points) < 2 * PIECES:
        return None
    thinned = _thinned(points)
    fitted = linear_regression([p.x for p in thinned], [p.y for p in thinned]).slope
    cuts = [thinned[round(i * (len(thinned) - 1) / PIECES)] for i in range(PIECES + 1)]
    parts = [(b.y - a.y) / (b.x - a.x) for a, b in pairwise(cuts)]
    return Slope(fitted, stdev(parts) / math.sqrt(PIECES))


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Keep one point in each of fifty equal parts of log K.

    The late steps, which are many, then do not outweigh the others.
    """
    first = points[0].x
    width = (points[-1].x - first) / 50
    return list({int((point.x - first) / width): point for point in points}.values())


def _slopes(one: Series) -> list[Slope]:
    """Return the slopes of the runs that are long enough to fit one."""
    fits = [slope(run) for run in one.runs]
    return [fit for fit in fits if fit is not None]


def _over_seeds(one: Series) -> Slope:
    """Return the mean slope over seeds.

    Its error is from the spread over seeds or the mean error of the fits, whichever is larger.
    """
    fits = _slopes(one)
    values = [fit.value for fit in fits]
    spread = 0.0
    if len(fits) > 1:
        spread = stdev(values)
    error = max(spread, mean(fit.error for fit in fits)) / math.sqrt(len(fits))
    return Slope(mean(values), error)


def _text(fit: Slope) -> str:
    return f"{fit.value:.2f} ± {fit.error:.2f}".replace("-", "−")


def _lines(axes: Axes, series: Sequence[Series]) -> None:
    """Draw the fitted slope along the last decade of each curve, and the theorem's slope."""
    style: dict[str, Any] = {"color": axes.spines["left"].get_edgecolor(), "linewidth": 1.4}
    for one in series:
        fits = _slopes(one)
        if not fits:
            continue
        curves = [run.curve("test", "minimum") for run in one.runs if slope(run)]
        steps, _ = curves[0]
        ends = (steps[-1] / 10, steps[-1])
        last = math.exp(mean(math.log(values[-1]) for _, values in curves))
        first = last * 10 ** -mean(fit.value for fit in fits)
        axes.plot(
            ends,
            (first, last),
            linestyle=(0, (1, 1)),
            label=f"fit of {one.label}: slope {_text(_over_seeds(one))}",
            **style,
        )
        theorem = None
        if one is series[-1]:
            theorem = "theorem: slope −0.5"
        axes.plot(
            ends,
            (1.3 * first, 1.3 * first * 10**THEOREM),
            linestyle=(0, (4, 3)),
            label=theorem,
            **style,
        )


def _finding(series: Sequence[Series]) -> str:
    growths = [run.last("test", "growth") for one in series for run in one.runs]
    norms = "some vector GETS SHORTER"
    if min(growth for growth in growths if growth is not None) >= -ROUNDING:
        norms = "no vector ever gets shorter"
    fitted = [one for one in series if all(slope(run) for run in one.runs)]
    if not fitted:
        return f"too short to fit a slope, and {norms}"
    fits = [_over_seeds(one) for one in fitted]
    slopes = listed([f"{_text(fit)} ({one.label})" for one, fit in zip(fitted, fits, strict=True)])
    verdict = "NOT as fast as the theorem's −0.5"
    if all(fit.value <= THEOREM + fit.error for fit in fits):
        verdict = "as fast as the theorem's −0.5 or faster"
    return f"the squared gradient falls with slope {slopes}, {verdict}, and {norms}"


def _slope_value(run: Run) -> float | None:
    fit = slope(run)
    if fit is None:
        return None
    return fit.value


def _slope_error(run: Run) -> float | None:
    fit = slope(run)
    if fit is None:
        return None
    return fit.error


DESCRIPTIONS = {
    "convergence": Description(
        title="Convergence",
        about="Stochastic gradient descent with step k^−0.5 on a smooth random objective over "
        "O(N) (cwy) and St(N, M) (tcwy), from one start, with independent noise in each replica. "
        "Theorem 4: the smallest expected squared gradient so far is o(K^(−0.5+ε)). By its proof, "
        "the norms of the vectors never decrease. Slopes are fitted in log-log over the last "
        "decade of K.",
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
            Column("slope", _slope_value, lambda value: f"{value:.3f}"),
            Column("its standard error", _slope_error, lambda value: f"{value:.3f}"),
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
