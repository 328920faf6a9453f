"""How video prediction is reported: the test loss beside Table 4, what it took, and the frames themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, stdev

from ..data.kth import ACTIONS
from ..report.describe import Column, Curve, Description, Picture, Series
from ..report.runs import Run
from ..report.words import duration, listed
from .recipes import paper

# Table 4: l1 a frame for each of ACTIONS.
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
"""Settings that must be the paper's for its numbers to stand beside a run."""
WHOLE = "100.0% of the set's frames"
"""The part of KTH that the paper's are of."""


def tested(run: Run) -> float | None:
    """The loss of the state that was best on the validation part: on the test part, or, where there is none, on its own."""
    test = run.last("test", "loss")
    return (
        test
        if test is not None or run.record is None
        else min(run.curve("validation", "loss")[1], default=None)
    )


def epoch_seconds(run: Run) -> float | None:
    """The time of an epoch, from the median reading: those that compile or record are left out so."""
    steps, times = run.curve("train", "step_ms")
    epochs = run.curve("train", "epoch")[1]
    return median(times) * steps[-1] / epochs[-1] / 1e3 if times else None


def _part(run: Run) -> str | None:
    """Which part of KTH a run was on; of other sets nothing is said."""
    return (run.record or {}).get("data", {}).get("part")


def _told(values: Sequence[float]) -> str:
    spread = f" ± {stdev(values) / math.sqrt(len(values)):.1f}" if len(values) > 1 else ""
    return f"{mean(values):.1f}{spread}"


def _finding(series: Sequence[Series]) -> str:
    losses = {
        one.label: [loss for run in one.runs if (loss := tested(run)) is not None] for one in series
    }
    ranked = sorted(
        ((label, values) for label, values in losses.items() if values),
        key=lambda item: mean(item[1]),
    )
    if not ranked:
        return "not tested yet"
    parts = {part for one in series for run in one.runs if (part := _part(run)) is not None}
    if len(parts) > 1:
        return f"not to be compared: runs on {listed(sorted(parts))}"
    verb = "predicts best," if len(ranked) > 1 else "is off by"
    told = f"{ranked[0][0]} {verb} {_told(ranked[0][1])} a frame"
    if len(ranked) > 1:
        told += f", then {ranked[1][0]}, {_told(ranked[1][1])}"
    place = [label for label, _ in ranked].index("tcwy") + 1 if losses.get("tcwy") else 1
    if place > 2:
        told += f"; tcwy, {_told(losses['tcwy'])}, is number {place} of {len(ranked)}"
    return (
        told
        if parts <= {WHOLE}
        else f"{told} (on {parts.pop()}: not to be compared with the paper)"
    )


def _pictures(series: Sequence[Series]) -> list[Picture]:
    from .pictures import STRIP, animation, picture, read

    kept = {
        one.label: [path for run in one.runs if _whole(path := run.folder / STRIP)]
        for one in series
    }
    strips = [(label, read(paths[0])) for label, paths in kept.items() if paths]
    if not strips:
        return []
    text = "True frames, and each predicted from those before it, by the best state of one seed of each method"
    return [
        Picture("frames.png", picture(strips), f"{text}."),
        Picture("frames.gif", animation(strips), f"{text}, in motion."),
    ]


def _whole(path: Path) -> bool:
    """Whether a picture of the run's own is there; a link or a pipe is none."""
    return path.is_file() and not path.is_symlink()


def _published(run: Run) -> float | None:
    """Table 4's, for a run with its settings."""
    theirs = paper(run.method, run.config["action"]).to_dict()
    if any(run.config[name] != theirs[name] for name in LIKE):
        return None
    return PAPER[run.method][ACTIONS.index(run.config["action"])]


def _over_epochs(split: str, told: str) -> Curve:
    return Curve(
        split,
        "loss",
        f"l1 a frame ({told})",
        split=split,
        along="epoch",
        along_label="epoch",
        scale="log",
    )


def _description(title: str, about: str, panels: dict[str, str], *more: Column) -> Description:
    return Description(
        title=title,
        panels=panels,
        about=f"Each frame is predicted from those before it, and the l1 distance to the true one, summed over its pixels (in "
        f"[0, 1]), is averaged over all frames. {about}",
        curves=(_over_epochs("validation", "validation"), _over_epochs("train", "training")),
        columns=(
            Column("test l1 a frame", tested, "{:.1f}".format),
            *more,
            Column(
                "best validation l1",
                lambda run: min(run.curve("validation", "loss")[1], default=None),
                "{:.1f}".format,
            ),
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
            Column("time an epoch", epoch_seconds, duration),
        ),
        finding=_finding,
        pictures=_pictures,
    )


DESCRIPTIONS = {
    "kth": _description(
        "KTH",
        "The paper, on the whole set (Table 4): T-CWY predicts best for every action; ConvLSTM has 3.26 M parameters and takes "
        "8.7 GB, the others 0.72 M and 3.5 GB. Its test l1 stands beside runs with its settings.",
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
