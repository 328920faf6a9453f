"""Report retrieval: who finds the translation, with how many parameters, in which time."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from ..report.describe import Column, Curve, Description, Series
from ..report.runs import Run
from ..report.words import listed

LABELS = {
    "cwy": "cwy (one side)",
    "cwy-both": "cwy (both sides)",
    "lora": "LoRA",
    "oft": "OFT",
    "hra": "HRA",
    "full": "all weights",
}
"""The methods in words."""


def _trained(run: Run) -> float | None:
    if not run.record:
        return None
    return run.record["data"].get("trained parameters")


def _memory(run: Run) -> float | None:
    if not run.record or not run.record.get("peak_memory"):
        return None
    return run.record["peak_memory"] / 1e6


def _finding(series: Sequence[Series]) -> str:
    ranked = []
    for one in series:
        scores = [run.last("test", "accuracy") for run in one.runs]
        known = [score for score in scores if score is not None]
        if known:
            ranked.append((mean(known), LABELS.get(one.method, one.label)))
    ranked.sort(reverse=True)
    if not ranked:
        return "not evaluated yet"
    found = [f"{label} {score:.1%}" for score, label in ranked]
    return f"the right sentence is ranked first by {listed(found)}"


def _share(value: float) -> str:
    return f"{value:.1%}"


DESCRIPTIONS = {
    "retrieval": Description(
        title="Retrieval",
        panels={"rank": "rank", "iterations": "steps"},
        about="An English sentence encoder (all-MiniLM-L6-v2, 22.6 M weights) is adapted so that a "
        "Spanish sentence finds its English translation among 1,000 held-out pairs of Tatoeba. "
        "The adapters have about the same number of parameters. Not in the paper.",
        curves=(
            Curve(
                "validation",
                "mrr",
                "mean reciprocal rank (validation)",
                split="validation",
            ),
            Curve("train", "loss", "contrastive loss (training)", scale="log"),
        ),
        columns=(
            Column("ranked first", lambda run: run.last("test", "accuracy"), _share),
            Column("reciprocal rank", lambda run: run.last("test", "mrr"), "{:.3f}".format),
            Column("trained parameters", _trained, "{:,.0f}".format),
            Column("peak memory, MB", _memory, "{:,.0f}".format),
            Column(
                "orthogonality error",
                lambda run: run.last("test", "orthogonality_error"),
                "{:.0e}".format,
            ),
        ),
        finding=_finding,
    )
}
