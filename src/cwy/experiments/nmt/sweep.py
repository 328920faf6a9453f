"""Tune and train the networks of translation. Each stage is a command.

1. "tune": networks with a search get the same points, two epochs each.
2. "final": every network is trained for up to ten epochs with several seeds,
   at its best point.
3. "rate": the paper's learning rate, as it is and with eleven settings that
   may rescue it.
4. "best-rate": those of these settings that --rescues names, for ten epochs.
5. "start": three networks with embeddings of three scales, and two of them
   with input maps of other scales, too.
6. "decay": many networks at one point for all, with a learning rate that
   decays and two amounts of dropout.
7. "gate": forms of a gate in small networks, compared on validation pairs.
8. "tune-decay": a second search, for the LSTM, the GRU and the gate with
   L = 256. Points have up to ten epochs, a learning rate that decays, and
   dropout.
9. "final-decay": these networks, each at its best point. L = 512 takes the
   point of L = 256.

python -m cwy.experiments.nmt.sweep STAGE OUT [--device cuda] [...]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ..engine.config import ConfigError, choose
from ..engine.files import Damaged
from ..engine.runner import check_device
from ..engine.signals import outlast
from ..engine.task import PRECISIONS, settings
from ..pool import SweepStopped, print_all
from ..sweeps import Place, Planned, lines, merge, read_known, restore
from .networks import CONTENDERS, GROUPS, SEEDS, Network, select
from .stages import DROPOUTS, RESCUES, SEARCHES, STAGES, Selection, unfinished

MOST_NAMES = 5
"""How many networks a message names."""
NO_TEST = ("validation", "final_test")
"""Settings that keep test pairs from runs that choose a setting."""


def _numbers(kind: type[int] | type[float]) -> Callable[[str], list[int] | list[float]]:
    """Return a function that reads an argument that is numbers, separated by commas."""

    def read_all(text: str) -> list[int] | list[float]:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            whole = ""
            if kind is int:
                whole = "whole "
            raise argparse.ArgumentTypeError(
                f"must be {whole}numbers with commas between them, got {text!r}."
            ) from None

    return read_all


def _rescues(text: str) -> list[str]:
    """Read an argument that names settings that may rescue the paper's learning rate."""
    try:
        return [choose("rescue", name, RESCUES) for name in text.split(",")]
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def named_networks(text: str) -> tuple[Network, ...]:
    """Read an argument that names networks or groups, separated by commas."""
    try:
        return select(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _records(text: str) -> list[str]:
    """Read an argument that names a file with a record of a run in each line."""
    try:
        return read_known(Path(text))
    except Damaged as damage:
        raise argparse.ArgumentTypeError(str(damage)) from None
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {text}: {error.strerror}") from None


def _count(text: str) -> int:
    """Read an argument that is a positive whole number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text}.")
    return int(text)


def _seconds(text: str) -> float:
    """Read an argument that is a time."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text}.")
    return value


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Show defaults, and the stages line by line."""


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cwy.experiments.nmt.sweep",
        description=__doc__,
        formatter_class=_Help,
    )
    parser.add_argument("stage", choices=STAGES, metavar="STAGE", help="one of those above")
    parser.add_argument("out", type=Path, help="the folder of all stages")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--precision", default="float32", choices=PRECISIONS, help="as cwy train takes it"
    )
    parser.add_argument("--processes", type=_count, default=1, help="how many runs at a time")
    parser.add_argument(
        "--seconds", type=_seconds, default=math.inf, help="start no run after this"
    )
    parser.add_argument(
        "--stop", type=_seconds, default=math.inf, help="save and stop runs after these seconds"
    )
    parser.add_argument(
        "--networks",
        type=named_networks,
        default=",".join(GROUPS),
        help="names or groups, for tune, final, decay, tune-decay and final-decay. "
        f"Groups: {', '.join(GROUPS)}",
    )
    parser.add_argument(
        "--seeds",
        type=_numbers(int),
        default="0,1,2",
        help="for final, decay, gate and final-decay",
    )
    parser.add_argument(
        "--rescues",
        type=_rescues,
        default="small-warm-clip,all",
        help="for best-rate",
    )
    parser.add_argument(
        "--dropouts", type=_numbers(float), default=",".join(map(str, DROPOUTS)), help="for decay"
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="for every run, repeated",
    )
    parser.add_argument(
        "--known",
        metavar="FILE",
        type=_records,
        action="append",
        default=[],
        help="records of a sweep, whose runs are not trained again. Repeated",
    )
    return parser


def _no_runs(stage: str, chosen: Selection) -> str:
    """Return why a stage has nothing to train."""
    asked = ", ".join(network.name for network in chosen.networks)
    if len(chosen.networks) > MOST_NAMES:
        asked = f"these {len(chosen.networks)} networks"
    reason = f"the stage {stage} has no run of {asked} with the seeds {chosen.seeds}."
    if stage.endswith("-decay"):
        allowed = ", ".join(network.name for network in CONTENDERS)
        reason += f" Its networks are {allowed}."
    if stage in SEARCHES:
        search = stage.replace("final", "tune")
        reason += f" It needs the runs of {search}, in the same folder or by --known, and seeds"
        reason += f" among {', '.join(map(str, SEEDS))}."
    return reason


def _warn_of_unfinished(stage: str, chosen: Selection) -> None:
    """Print a warning for each search that a stage needs, and that has not ended."""
    if stage not in SEARCHES:
        return
    search, networks = SEARCHES[stage]
    names = {network.name for network in chosen.networks}
    sources = {network.like or network.name for network in networks if network.name in names}
    searched = [network for network in networks if network.name in sources]
    for sentence in unfinished(chosen.out, searched, search):
        print(f"Warning: {sentence}", file=sys.stderr)


def _check_set(stage: str, given: Iterable[str], runs: Iterable[Planned]) -> None:
    """Raise if a setting for every run is one in which the runs differ, or reads test pairs."""
    planned = [dict(text.split("=", 1) for text in run.settings) for run in runs]
    for text in given:
        key = text.partition("=")[0].strip()
        values = {settings.get(key) for settings in planned}
        guards_test = key in NO_TEST and values != {None}
        if len(values) > 1 or guards_test:
            raise ConfigError(
                f"--set can't have {key}: the stage {stage} sets it for its runs. Leave it out."
            )


def main() -> None:
    """Run a stage."""
    parser = _arguments()
    given = parser.parse_args()
    try:
        check_device(given.device)
    except ConfigError as error:
        parser.error(str(error))
    chosen = Selection(given.out, given.networks, given.seeds, given.rescues, given.dropouts)
    merged = given.out / f"{given.stage}.jsonl"
    try:
        for records in given.known:
            restore(given.out, records)
        runs = _plan(given.stage, chosen, given.set)
        # It also finds out whether the folder can be written to.
        merge(merged, lines(given.out, runs))
    except (ConfigError, Damaged) as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"cannot write to the folder {given.out}: {error.strerror}.")
    _warn_of_unfinished(given.stage, chosen)
    now = time.time()
    place = Place(given.out, given.device, given.precision, now + given.seconds, now + given.stop)
    try:
        failures = print_all(runs, place, given.processes)
    except SweepStopped as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(stopped.status)
    finally:
        merge(merged, lines(given.out, runs))
    if failures:
        sys.exit(f"runs that failed: {failures}. The lines above state why.")


def _plan(stage: str, chosen: Selection, added: Sequence[str]) -> list[Planned]:
    """Return the runs of a stage with more settings. Settings that can't be raise."""
    runs = STAGES[stage](chosen)
    if not runs:
        raise ConfigError(_no_runs(stage, chosen))
    _check_set(stage, added, runs)
    runs = [replace(run, settings=(*run.settings, *added)) for run in runs]
    for run in runs:
        try:
            settings(run.what, run.method, run.seed, run.settings)
        except ConfigError as error:
            raise ConfigError(f"{run.folder}: {error}") from None
    return runs


if __name__ == "__main__":
    outlast()
    main()
