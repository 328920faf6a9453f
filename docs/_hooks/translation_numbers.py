"""Numbers of translation that need more than one record: shares of the LSTM's time, searches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from record_values import NumberError, Runs, line, lines_of, lowest, record, runs

PACE = "h200/translation-pace"
"""The file with the times of translation's training steps."""


def step_ms(
    network: str, kind: str = "graph", precision: str = "float32", file: str = PACE
) -> float:
    """Return the milliseconds of a training step of translation, "plain" or as a "graph"."""
    return line(file, f"{network} {precision}")[f"{kind}_ms"]


def tuned(network: str) -> Runs:
    """Return the final runs of a network at its best point of the first search."""
    return runs(f"nmt/tuned-{network}-seed*")


FIRST_PAIRS = "cpu-1-thread/translation-first-pairs"
"""The file about the first 100,000 pairs, on which the paper probably trained."""
SPECIAL_WORDS = 4
"""Entries of a vocabulary that are no words, such as padding."""


def with_every_word(network: str, pairs: str = "the first pairs") -> float:
    """Return the millions of parameters of a network that knows every word of some pairs."""
    found = record(f"nmt/tuned-{network}-seed0")
    every_word = line(FIRST_PAIRS, f"words of {pairs}")["words"]
    sides = zip(every_word, found["data"]["vocabulary"], strict=True)
    more_source, more_target = (words + SPECIAL_WORDS - known for words, known in sides)
    embedding = found["config"]["embedding_size"]
    # The readout has a row and a bias for each word of the target.
    readout = found["config"]["hidden_size"] + 1
    more = more_source * embedding + more_target * (embedding + readout)
    return (found["parameters"] + more) / 1e6


def of_paper(perplexity: str, positions: str, unit: str = "nats") -> float:
    """Return a perplexity of the paper, 2^loss, in nats per word of the first 100,000 pairs.

    Args:
        perplexity: of a mean over all positions.
        positions: of each sentence, with its padding.
        unit: of the loss, "nats" or "bits".
    """
    loss = math.log2(float(perplexity))
    if unit == "bits":
        loss *= math.log(2)
    # The end of a sentence counts as a word.
    words = line(FIRST_PAIRS, "words of the first pairs")["mean words"][1] + 1
    return loss * float(positions) / words


SEARCHED = {"float32": "nmt/float32-decay", "bfloat16": "nmt/tuned-decay"}
"""How the names of runs at the best points of the second search begin, by their precision."""


def searched(network: str, precision: str) -> Runs:
    """Return the runs of a network of translation at its best point of the second search."""
    return runs(f"{SEARCHED[precision]}-{network}-seed*")


def at_recipe(network: str, dropout: float = 0.3) -> Runs:
    """Return the runs of a network at the point of the recipes, which is one for all."""
    return runs(f"nmt/decay-{network}-dropout{dropout}-seed*")


def common_best(networks: Sequence[str], setting: str) -> float:
    """Return a setting of the best point of the second search, which these networks share."""
    best = {}
    for network in networks:
        ended = [
            one
            for name, one in lines_of("h200/translation-tune-decay").items()
            if name.startswith(f"tuning-decay/{network}-") and one["status"] == "finished"
        ]
        if not ended:
            raise NumberError(f"translation-tune-decay.jsonl has no finished run of {network!r}.")
        best[network] = min(ended, key=lowest)
    points = {one["run"].rpartition("-")[2] for one in best.values()}
    if len(points) != 1:
        raise NumberError(f"{', '.join(networks)} have no common best point.")
    return best[networks[0]]["config"][setting]


def lower_points(network: str, other: str) -> str:
    """Write at how many points of the search of small networks the first has the lower loss."""
    found = lines_of("cpu-1-thread/translation-tune-small")
    count = 0
    for name, one in found.items():
        point = name.removeprefix(f"tuning-small/{network}-")
        if point != name:
            count += lowest(one) < lowest(found[f"tuning-small/{other}-{point}"])
    return str(count)


def of_lstm(network: str, kind: str, precision: str, file: str = PACE) -> str:
    """Write the time of a training step of translation as a percentage of the LSTM's."""
    own = step_ms(network, kind, precision, file)
    return _share(own, step_ms("lstm", kind, precision, file))


def to_best_epoch(network: str, precision: str) -> str:
    """Write the time of all steps up to the best epoch as a percentage of the LSTM's."""
    own = _to_best(searched(network, precision)) * step_ms(network, "graph", precision)
    theirs = _to_best(searched("lstm", precision)) * step_ms("lstm", "graph", precision)
    return _share(own, theirs)


def recipe_to_best_epoch(network: str) -> str:
    """Write the same at the point of the recipes, under bfloat16 autocast."""
    own = _to_best(at_recipe(network)) * step_ms(network, "graph", "bfloat16")
    theirs = _to_best(at_recipe("lstm")) * step_ms("lstm", "graph", "bfloat16")
    return _share(own, theirs)


def _to_best(found: Runs) -> float:
    """Return the mean number of epochs up to the best one."""
    return found.lowest_epoch("loss", "validation").mean


@dataclass(frozen=True)
class _Reached:
    """Hold the epochs that a network and the LSTM take to the LSTM's lowest validation loss.

    Attributes:
        own: those of the network, or None if it never has this loss.
        theirs: those of the LSTM with the same seed.
    """

    own: float | None
    theirs: float


def _reached(network: str, precision: str) -> list[_Reached]:
    """Return the epochs to the LSTM's lowest validation loss, for each seed."""
    found = []
    pairs = zip(searched(network, precision).runs, searched("lstm", precision).runs, strict=True)
    for run, lstm in pairs:
        epochs, losses = lstm.curve("validation", "loss", "epoch")
        goal = min(losses)
        at_goal = [
            epoch
            for epoch, loss in zip(*run.curve("validation", "loss", "epoch"), strict=True)
            if loss <= goal
        ]
        first = None
        if at_goal:
            first = at_goal[0]
        found.append(_Reached(first, epochs[losses.index(goal)]))
    return found


def to_loss_of_lstm(network: str, precision: str) -> str:
    """Write the time of all steps up to the LSTM's lowest validation loss, as a percentage.

    The whole is the time that the LSTM takes to this loss. Both have the same seed, and the
    percentage is of the means over the seeds.
    """
    found = _reached(network, precision)
    own = [one.own for one in found if one.own is not None]
    if len(own) < len(found):
        raise NumberError(f"{network}: a seed never has the LSTM's lowest validation loss.")
    time = step_ms(network, "graph", precision) * mean(own)
    whole = step_ms("lstm", "graph", precision) * mean(one.theirs for one in found)
    return _share(time, whole)


def to_loss_by_seed(network: str, precision: str) -> str:
    """Write the same percentage of each seed that has this loss at all, from the lowest on."""
    ms = step_ms(network, "graph", precision)
    lstm_ms = step_ms("lstm", "graph", precision)
    found = _reached(network, precision)
    shares = [ms * one.own / (lstm_ms * one.theirs) for one in found if one.own is not None]
    return " and ".join(_share(share, 1) for share in sorted(shares))


def parameters_of_lstm(network: str) -> str:
    """Write the parameters of a network of translation as a percentage of the LSTM's."""
    own = searched(network, "bfloat16").of_record("parameters")
    return _share(own.mean, searched("lstm", "bfloat16").of_record("parameters").mean)


def _share(value: float, whole: float) -> str:
    return f"{100 * value / whole:.0f}%"
