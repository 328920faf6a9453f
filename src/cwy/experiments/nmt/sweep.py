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
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from ..engine.config import ConfigError, choose
from ..engine.runner import check_device
from ..engine.signals import outlast
from ..engine.task import PRECISIONS, settings
from ..pool import SweepStopped, print_all
from ..sweeps import Place, lines, merge, restore
from .networks import CONTENDERS, GROUPS, SEEDS, Network, select
from .stages import DROPOUTS, RESCUES, SEARCHES, STAGES, Selection, unfinished

MOST_NAMES = 5
"""How many networks a message names."""


def _each(convert: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a function that reads an argument that is a list, separated by commas."""

    def read_all(text: str) -> list[Any]:
        try:
            return [convert(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_all


def named_networks(text: str) -> tuple[Network, ...]:
    """Read an argument that names networks or groups, separated by commas."""
    try:
        return select(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _records(text: str) -> list[str]:
    """Read an argument that names a file with a record of a run in each line."""
    try:
        found = Path(text).read_text(encoding="utf-8").splitlines()
        for line in found:
            _check_record(json.loads(line))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text} has no records of a sweep: {error}") from None
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is empty.")
    return found


def _check_record(record: dict[str, Any]) -> None:
    """Raise unless a line has a run inside of a folder, and how it ended."""
    place = PurePath(record["run"])
    if place.is_absolute() or ".." in place.parts:
        raise ValueError(f"the run {record['run']!r} is not inside of a folder")
    if record["status"] == "finished":
        float(record["best"]["value"])


def _count(text: str) -> int:
    """Read an argument that is a positive whole number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text}.")
    return int(text)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cwy.experiments.nmt.sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stage", choices=STAGES, metavar="STAGE", help="one of those above")
    parser.add_argument("out", type=Path, help="the folder of all stages")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--precision", default="float32", choices=PRECISIONS)
    parser.add_argument("--processes", type=_count, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no run after this")
    parser.add_argument(
        "--stop", type=float, default=1e9, help="save and stop runs after these seconds"
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
        type=_each(int),
        default="0,1,2",
        help="for final, decay, gate and final-decay",
    )
    parser.add_argument(
        "--rescues",
        type=_each(lambda name: choose("rescue", name, RESCUES)),
        default="small-warm-clip,all",
        help="for best-rate",
    )
    parser.add_argument("--dropouts", type=_each(float), default=DROPOUTS, help="for decay")
    parser.add_argument(
        "--set", action="append", default=[], help="key=value, for every run, repeated"
    )
    parser.add_argument(
        "--known", type=_records, action="append", default=[], help="records of a sweep, repeated"
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
    """Print a warning for each chosen network whose search has not ended, if a stage needs it."""
    if stage not in SEARCHES:
        return
    search, networks = SEARCHES[stage]
    names = {network.name for network in chosen.networks}
    named = [network for network in networks if network.name in names]
    for sentence in unfinished(chosen.out, named, search):
        print(f"Warning: {sentence}", file=sys.stderr)


def main() -> None:
    """Run a stage."""
    parser = _arguments()
    given = parser.parse_args()
    try:
        check_device(given.device)
    except ConfigError as error:
        parser.error(str(error))
    for records in given.known:
        restore(given.out, records)
    chosen = Selection(given.out, given.networks, given.seeds, given.rescues, given.dropouts)
    runs = [
        replace(run, settings=(*run.settings, *given.set)) for run in STAGES[given.stage](chosen)
    ]
    if not runs:
        parser.error(_no_runs(given.stage, chosen))
    for run in runs:
        try:
            settings(run.what, run.method, run.seed, run.settings)
        except ConfigError as error:
            parser.error(f"{run.folder}: {error}")
    _warn_of_unfinished(given.stage, chosen)
    now = time.time()
    place = Place(given.out, given.device, given.precision, now + given.seconds, now + given.stop)
    try:
        failures = print_all(runs, place, given.processes)
    except SweepStopped as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(stopped.status)
    finally:
        merge(given.out / f"{given.stage}.jsonl", lines(given.out, runs))
    if failures:
        sys.exit(f"runs that failed: {failures}. The lines above state why.")


if __name__ == "__main__":
    outlast()
    main()
