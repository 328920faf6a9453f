"""Numbers of translation that need more than one record: shares of the LSTM's time, searches."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from record_values import NumberError, Runs, line, lines_of, lowest, runs

PACE = "h200/translation-pace"
"""The file with the times of translation's training steps."""


def step_ms(
    network: str, kind: str = "graph", precision: str = "float32", file: str = PACE
) -> float:
    """Return the milliseconds of a training step of translation, "plain" or as a "graph"."""
    return line(file, f"{network} {precision}")[f"{kind}_ms"]


SEARCHED = {"float32": "nmt/float32-decay", "bfloat16": "nmt/tuned-decay"}
"""How the names of runs at the best points of the second search begin, by their precision."""


def searched(network: str, precision: str) -> Runs:
    """Return the runs of a network of translation at its best point of the second search."""
    return runs(f"{SEARCHED[precision]}-{network}-seed*")


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


def of_lstm(network: str, kind: str, precision: str, file: str = PACE) -> str:
    """Write the time of a training step of translation as a percentage of the LSTM's."""
    own = step_ms(network, kind, precision, file)
    return _share(own, step_ms("lstm", kind, precision, file))


def plain_of_lstm(network: str, precision: str) -> str:
    """Write the share of the LSTM's time in plain calls, now and as measured earlier."""
    files = (PACE, f"{PACE}-earlier")
    shares = [of_lstm(network, "plain", precision, file) for file in files]
    return " and ".join(dict.fromkeys(shares))


def to_best_epoch(network: str, precision: str) -> str:
    """Write the time of all steps up to the best epoch as a percentage of the LSTM's."""

    def time(one: str) -> float:
        epochs = searched(one, precision).lowest_epoch("loss", "validation")
        return step_ms(one, "graph", precision) * epochs.mean

    return _share(time(network), time("lstm"))


def to_loss_of_lstm(network: str, precision: str) -> str:
    """Write the time of all steps up to the LSTM's lowest validation loss, as a percentage.

    The whole is the time that the LSTM takes to this loss. Both have the same seed, and the
    percentage is of the means over the seeds.
    """
    own = []
    theirs = []
    pairs = zip(searched(network, precision).runs, searched("lstm", precision).runs, strict=True)
    for run, lstm in pairs:
        epochs, losses = lstm.curve("validation", "loss", "epoch")
        goal = min(losses)
        theirs.append(epochs[losses.index(goal)])
        reached = [
            epoch
            for epoch, loss in zip(*run.curve("validation", "loss", "epoch"), strict=True)
            if loss <= goal
        ]
        if not reached:
            raise NumberError(f"{run.folder.name} never has the LSTM's lowest validation loss.")
        own.append(reached[0])
    time = step_ms(network, "graph", precision) * mean(own)
    return _share(time, step_ms("lstm", "graph", precision) * mean(theirs))


def parameters_of_lstm(network: str) -> str:
    """Write the parameters of a network of translation as a percentage of the LSTM's."""
    own = searched(network, "bfloat16").of_record("parameters")
    return _share(own.mean, searched("lstm", "bfloat16").of_record("parameters").mean)


def _share(value: float, whole: float) -> str:
    return f"{100 * value / whole:.0f}%"
