"""Report video prediction: the test loss next to Table 4, its cost, and predicted frames."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from ..data.kth import ACTIONS
from ..report.describe import Column, Curve, Description, Picture, Series
from ..report.runs import Run
from ..report.words import duration, listed
from .recipes import paper

# Table 4: l1 per frame for each of ACTIONS.
PAPER = {
    "convlstm": (223.3, 266.8, 297.8, 188.9, 157.9, 162.3),
    "zeros": (160.3, 176.1, 203.8, 179.0, 197.2, 147.4),
    "glorot": (145.8, 161.5, 182.1, 179.9, 164.5, 145.4),
    "orth-init": (139.9, 153.2, 175.0, 173.3, 150.8, 144.0),
    "rgd-c-c": (135.8, 155.7, 170.7, 172.9, 160.3, 144.5),
    "rgd-e-c": (143.3, 152.5, 173.7, 171.9, 172.9, 142.6),
    "rgd-c-qr": (143.1, 155.0, 171.5, 173.1, 150.2, 142.7),
    "rgd-e-qr": (135.5, 153.9, 169.6, 169.9, 160.4, 142.5),
    "rgd-adam": (142.6, 157.3, 177.8, 176.8, 159.1, 145.2),
    "own": (137.5, 155.0, 177.7, 171.3, 149.8, 142.5),
    "tcwy": (134.6, 149.8, 166.7, 166.2, 147.8, 141.2),
}

LIKE = ("epochs", "batch_size", "channels", "kernel_size", "optimizer", "lr", "orthogonal_lr")
"""Settings that must equal the paper's for a comparison with its numbers."""
WHOLE = "100.0% of the set's frames"
"""The part of KTH that the paper's numbers are of."""


class Losses(NamedTuple):
    """Hold the test losses of the runs of a series."""

    label: str
    values: list[float]

    def __str__(self) -> str:
        text = f"{mean(self.values):.1f}"
        if len(self.values) > 1:
            text += f" ± {stdev(self.values) / math.sqrt(len(self.values)):.1f}"
        return text


def tested(run: Run) -> float | None:
    """Return the test loss of the state with the best validation loss.

    Return its validation loss if there is no test part.
    """
    test = run.last("test", "loss")
    if test is None and run.record is not None:
        return _best_validation(run)
    return test


def _best_validation(run: Run) -> float | None:
    return min(run.curve("validation", "loss")[1], default=None)


def epoch_seconds(run: Run) -> float | None:
    """Return the training time divided by the epochs done."""
    epochs = run.curve("train", "epoch")[1]
    if not epochs:
        return None
    return run.seconds / epochs[-1]


def _part(run: Run) -> str | None:
    """Return which part of KTH a run was on, or None for other sets."""
    return (run.record or {}).get("data", {}).get("part")


def _ranked(series: Sequence[Series]) -> list[Losses]:
    """Return the test losses of the series that have some, the smallest first."""
    found = []
    for one in series:
        losses = [tested(run) for run in one.runs]
        known = [loss for loss in losses if loss is not None]
        if known:
            found.append(Losses(one.label, known))
    return sorted(found, key=lambda losses: mean(losses.values))


def _finding(series: Sequence[Series]) -> str:
    ranked = _ranked(series)
    if not ranked:
        return "not tested yet"
    found = [_part(run) for one in series for run in one.runs]
    parts = {part for part in found if part is not None}
    if len(parts) > 1:
        return f"not to be compared: runs on {listed(sorted(parts))}"
    text = _ranking(ranked)
    if parts <= {WHOLE}:
        return text
    return f"{text} (on {parts.pop()}: not to be compared with the paper)"


def _ranking(ranked: Sequence[Losses]) -> str:
    """Name the two best series, and the place of tcwy if it is not among them."""
    best = ranked[0]
    if len(ranked) == 1:
        return f"{best.label} is off by {best} per frame"
    second = ranked[1]
    text = f"{best.label} predicts best, {best} per frame, then {second.label}, {second}"
    for place, losses in enumerate(ranked, 1):
        if losses.label == "tcwy" and place > 2:
            text += f", and tcwy, {losses}, is number {place} of {len(ranked)}"
    return text


def _pictures(series: Sequence[Series]) -> list[Picture]:
    from .pictures import STRIP, NamedStrip, animation, picture, read

    strips = []
    for one in series:
        paths = [run.folder / STRIP for run in one.runs]
        kept = [path for path in paths if _is_plain_file(path)]
        if kept:
            strips.append(NamedStrip(one.label, read(kept[0])))
    if not strips:
        return []
    text = (
        "True frames, and each predicted from those before it, by the best state of one seed of "
        "each method"
    )
    return [
        Picture("frames.webp", picture(strips), f"{text}."),
        Picture("moving.webp", animation(strips), f"{text}, in motion."),
    ]


def _is_plain_file(path: Path) -> bool:
    """Return whether the run has this file, and it is not a link or a pipe."""
    return path.is_file() and not path.is_symlink()


def _published(run: Run) -> float | None:
    """Return the value of Table 4, for a run with the paper's settings."""
    action = run.config["action"]
    theirs = paper(run.method, action).to_dict()
    if any(run.config[name] != theirs[name] for name in LIKE):
        return None
    return dict(zip(ACTIONS, PAPER[run.method], strict=True))[action]


def _over_epochs(split: str, name: str) -> Curve:
    return Curve(
        split,
        "loss",
        f"{name} l1 per frame",
        split=split,
        along="epoch",
        along_label="epoch",
        scale="log",
    )


def _description(title: str, about: str, panels: dict[str, str], *more: Column) -> Description:
    return Description(
        title=title,
        panels=panels,
        about="Each frame is predicted from those before it, and the l1 distance to the true one, "
        f"summed over its pixels (in [0, 1]), is averaged over all frames. {about}",
        curves=(_over_epochs("validation", "validation"), _over_epochs("train", "training")),
        columns=(
            Column("test l1 per frame", tested, "{:.1f}".format),
            *more,
            Column("best validation l1 per frame", _best_validation, "{:.1f}".format),
            Column(
                "parameters",
                lambda run: (run.record or {}).get("parameters"),
                lambda count: f"{count / 1e6:.2f} M",
            ),
            Column(
                "GPU memory",
                lambda run: (run.record or {}).get("peak_memory"),
                lambda size: f"{size / 1e9:.2f} GB",
            ),
            Column("time per epoch", epoch_seconds, duration),
        ),
        finding=_finding,
        pictures=_pictures,
    )


DESCRIPTIONS = {
    "kth": _description(
        "KTH",
        "The paper, on the whole set (Table 4): T-CWY predicts best for every action. "
        "ConvLSTM has 3.26 M parameters and takes 8.7 GB, the others 0.72 M and 3.5 GB. "
        "Its test l1 is shown next to runs with its settings.",
        {"action": ""},
        Column("the paper's, on the whole set", _published, "{:.1f}".format, "other settings"),
    ),
    "weizmann": _description(
        "Weizmann", "Five persons train, two validate, two test.", {"action": ""}
    ),
    "movingmnist": _description(
        "Moving MNIST", "Two digits move and bounce in 20 frames of 64 x 64.", {}
    ),
}
