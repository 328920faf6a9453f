"""Tune and train the networks of translation. Each stage is a command.

1. "tune": networks with a search get the same points, two epochs each.
2. "final": networks with a search, or with the point of another network, are
   trained for up to ten epochs with several seeds, at the best point.
3. "rate": the paper's learning rate, as it is and with eleven settings that
   may rescue it.
4. "best-rate": those of these settings that --rescues names, for ten epochs.
5. "start": three networks with embeddings of three scales, and two of them
   with input maps of other scales, too.
6. "decay": many networks at one point for all, with a learning rate that
   decays and two amounts of dropout.
7. "gate": forms of a gate in small networks, and a free RNN with one,
   compared on validation pairs.
8. "tune-decay": a second search, for the LSTM, the GRU and the gate with
   L = 256. Points have up to ten epochs, a learning rate that decays, and
   dropout.
9. "final-decay": these networks, each at its best point. L = 512 takes the
   point of L = 256.
10. "tune-small": a search for two small networks with a gate. The transition
    of one is orthogonal, and that of the other is free.
11. "final-small": both networks with three seeds, each at its best point.

python -m cwy.experiments.nmt.sweep STAGE OUT [--device cuda] [...]
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..engine.config import ConfigError, choose
from ..engine.files import Damaged
from ..engine.runner import check_device
from ..engine.signals import outlast, status
from ..engine.task import PRECISIONS
from ..pool import SweepStopped, print_all
from ..sweeps import (
    NOT_FINISHED,
    Place,
    Planned,
    Records,
    check_known,
    check_one_data,
    count_of,
    different,
    lines,
    merge,
    read_known,
    restore,
    wanted,
)
from .networks import GROUPS, SEEDS, Network, select
from .stages import (
    DROPOUTS,
    RESCUES,
    STAGES,
    Selection,
    Stage,
    best_points,
    trials,
    unfinished,
)

NO_TEST = ("validation", "final_test")
"""Settings that keep test pairs from runs that choose a setting."""
LOGGED = {"log_every", "save_every"}
"""Settings that change no number of a run."""


def _numbers(kind: type[int] | type[float]) -> Callable[[str], list[int] | list[float]]:
    """Return a function that reads an argument that is numbers, separated by commas."""

    def read_all(text: str) -> list[int] | list[float]:
        try:
            found = [kind(part) for part in text.split(",")]
        except ValueError:
            whole = ""
            if kind is int:
                whole = "whole "
            raise argparse.ArgumentTypeError(
                f"must be {whole}numbers with commas between them, got {text!r}."
            ) from None
        return list(dict.fromkeys(found))

    return read_all


def _rescues(text: str) -> list[str]:
    """Read an argument that names settings that may rescue the paper's learning rate."""
    try:
        return list(dict.fromkeys(choose("rescue", name, RESCUES) for name in text.split(",")))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def named_networks(text: str) -> dict[str, tuple[Network, ...]]:
    """Read an argument that names networks or groups, separated by commas."""
    try:
        return {name: select(name) for name in text.split(",")}
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _known(text: str) -> dict[str, dict[str, Any]]:
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


class _Help(argparse.RawDescriptionHelpFormatter):
    """Show the stages line by line."""


OPTIONS: dict[str, tuple[Callable[[str], Any], str]] = {
    "networks": (named_networks, f"names or groups, by default all. Groups: {', '.join(GROUPS)}"),
    "seeds": (_numbers(int), f"by default {','.join(map(str, SEEDS))}"),
    "rescues": (_rescues, "by default small-warm-clip,all"),
    "dropouts": (_numbers(float), f"by default {','.join(map(str, DROPOUTS))}"),
}
"""The options that only some stages have: what reads each, and its help."""
RESCUES_TO_REPEAT = ("small-warm-clip", "all")
"""The default of the stage best-rate."""


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cwy.experiments.nmt.sweep",
        description=__doc__,
        formatter_class=_Help,
    )
    parser.add_argument("stage", choices=STAGES, metavar="STAGE", help="one of those above")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder of all stages")
    parser.add_argument("--device", default="cpu", help="cpu or cuda, by default cpu")
    parser.add_argument(
        "--precision",
        default="float32",
        choices=PRECISIONS,
        help="as cwy train takes it, by default float32",
    )
    parser.add_argument(
        "--processes", type=_count, default=1, help="how many runs at a time, by default 1"
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=math.inf,
        help="start no run after this. What is left is counted, and is no failure",
    )
    parser.add_argument(
        "--stop", type=_seconds, default=math.inf, help="save and stop runs after these seconds"
    )
    for name, (read, text) in OPTIONS.items():
        having = ", ".join(stage for stage, one in STAGES.items() if name in one.options)
        parser.add_argument(f"--{name}", type=read, help=f"for {having}: {text}")
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
        type=_known,
        action="append",
        default=[],
        help="records of a sweep with the same settings, whose runs are not trained again. "
        "Repeated",
    )
    return parser


def _chosen(given: argparse.Namespace) -> Selection:
    """Return what the arguments choose. An option or a choice without a run raises."""
    stage = STAGES[given.stage]
    for name in OPTIONS:
        if getattr(given, name) is not None and name not in stage.options:
            having = ", ".join(other for other, one in STAGES.items() if name in one.options)
            raise ConfigError(f"the stage {given.stage} has no --{name}. Stages with it: {having}.")
    chosen = Selection(rescues=RESCUES_TO_REPEAT)
    if given.networks is not None:
        _check_each(given.stage, "networks", given.networks)
        every = [network for group in given.networks.values() for network in group]
        chosen = replace(chosen, networks=tuple(dict.fromkeys(every)))
    if given.seeds is not None:
        alone = {str(seed): (seed,) for seed in given.seeds}
        _check_each(given.stage, "seeds", alone, networks=chosen.networks)
        chosen = replace(chosen, seeds=given.seeds)
    if given.rescues is not None:
        chosen = replace(chosen, rescues=given.rescues)
    if given.dropouts is not None:
        chosen = replace(chosen, dropouts=given.dropouts)
    return chosen


def _check_each(
    name: str,
    option: str,
    choices: Mapping[str, Sequence[object]],
    **chosen: Sequence[object],
) -> None:
    """Raise if a choice, such as one network or one seed, has no run in a stage."""
    stage = STAGES[name]
    without = [
        text
        for text, choice in choices.items()
        if not stage.every_run(**chosen, **{option: choice})
    ]
    if without:
        seeds = sorted({run.seed for run in stage.every_run(**chosen)})
        message = f"the stage {name} has no run of --{option} {','.join(without)}."
        if option == "seeds":
            message += f" Its seeds: {', '.join(map(str, seeds))}."
        else:
            message += f" Its networks: {', '.join(_networks_of(stage))}."
        raise ConfigError(message)


def _networks_of(stage: Stage) -> list[str]:
    """Return the names of the networks that have runs in a stage."""
    return [
        network.name for network in Selection().networks if stage.every_run(networks=(network,))
    ]


def _plan(name: str, chosen: Selection, added: Sequence[str], place: Place) -> list[Planned]:
    """Return the runs of a stage with more settings. Settings that can't be raise."""
    stage = STAGES[name]
    runs = stage.plan(chosen)
    if not runs:
        search = name.replace("final", "tune")
        raise ConfigError(
            f"the stage {name} has nothing to train. It needs the runs of {search}, in the same "
            "folder or by --known."
        )
    _check_set(name, added, runs)
    runs = [replace(run, settings=(*run.settings, *added)) for run in runs]
    for run in runs:
        try:
            wanted(run, place)
        except ConfigError as error:
            raise ConfigError(f"{run.folder}: {error}") from None
    return runs


def _check_set(name: str, added: Sequence[str], runs: Sequence[Planned]) -> None:
    """Raise if a setting for every run is one that the stage decides, or reads test pairs."""
    decided = STAGES[name].decided()
    planned = _keys(runs)
    for text in added:
        key = _key(text)
        if key in decided or (key in NO_TEST and key in planned):
            raise ConfigError(
                f"--set can't have {key}: the stage {name} sets it for its runs. Leave it out."
            )


def _keys(runs: Iterable[Planned]) -> set[str]:
    """Return the names of the settings that runs have."""
    return {_key(text) for run in runs for text in run.settings}


def _key(text: str) -> str:
    """Return the name in a ``key=value`` text."""
    return text.partition("=")[0].strip()


def _warn_of_unfinished(stage: Stage, chosen: Selection, records: Records) -> None:
    """Print a warning for each search that a stage needs, and that has not ended."""
    if stage.search is None:
        return
    for sentence in unfinished(records, _searched(stage, chosen), stage.search):
        print(f"Warning: {sentence}", file=sys.stderr)


def _searched(stage: Stage, chosen: Selection) -> list[Network]:
    """Return the networks whose points the chosen ones take."""
    names = {network.name for network in chosen.networks}
    sources = {network.like or network.name for network in stage.searched if network.name in names}
    return [network for network in stage.searched if network.name in sources]


def _search_runs(stage: Stage, chosen: Selection, added: Sequence[str]) -> list[Planned]:
    """Return the runs of the search that a stage needs, with the settings for every run.

    Settings that the stage or the search has itself may differ between the two, and are left out.
    """
    if stage.search is None:
        return []
    runs = trials(_searched(stage, chosen), stage.search)
    own = _own_settings(stage, chosen)
    common = [text for text in added if _key(text) not in own]
    return [replace(run, settings=(*run.settings, *common)) for run in runs]


def _own_settings(stage: Stage, chosen: Selection) -> set[str]:
    """Return the names of the settings that a stage or its search has for its runs."""
    runs = stage.plan(chosen)
    if stage.search is not None:
        runs = [*runs, *trials(_searched(stage, chosen), stage.search)]
    return _keys(runs)


def _uncompared(stage: Stage, chosen: Selection, added: Sequence[str]) -> set[str]:
    """Return the names of the settings in which a search may differ from its stage."""
    return LOGGED | ({_key(text) for text in added} & _own_settings(stage, chosen))


def main() -> None:
    """Run a stage."""
    parser = _arguments()
    given = parser.parse_args()
    now = time.time()
    place = Place(given.out, given.device, given.precision, now + given.seconds, now + given.stop)
    known = {run: record for records in given.known for run, record in records.items()}
    merged = given.out / f"{given.stage}.jsonl"
    stage = STAGES[given.stage]
    records = Records(given.out, known)
    try:
        check_device(given.device)
        chosen = _chosen(given)
        if stage.search is not None:
            points = best_points(records, stage.searched, stage.search)
            chosen = replace(chosen, points=points)
        runs = _plan(given.stage, chosen, given.set, place)
        search_runs = _search_runs(stage, chosen, given.set)
        check_known(known, runs, place)
        check_one_data(records, (*runs, *search_runs))
        uncompared = _uncompared(stage, chosen, given.set)
        differing = different(records, search_runs, place, uncompared)
        # It also finds out whether the file can be read, and the folder written to.
        merge(merged, records.known_lines(runs))
        fitting = [run for run in (*runs, *search_runs) if run.folder not in differing]
        restore(records, fitting, place)
        merge(merged, lines(given.out, runs))
    except (ConfigError, Damaged) as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"cannot write to {error.filename or given.out}: {error.strerror}.")
    _warn_of_unfinished(stage, chosen, records)
    if differing:
        print(f"Warning: the search has other settings. {count_of(differing)}", file=sys.stderr)
    try:
        failures = print_all(runs, place, given.processes)
    except SweepStopped as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(stopped.status)
    finally:
        merge(merged, lines(given.out, runs))
    _print_left(lines(given.out, runs), failures)
    if failures:
        sys.exit(f"runs that failed: {failures}. The lines above state why.")
    try:
        check_one_data(records, (*runs, *search_runs))
    except (ConfigError, Damaged) as error:
        # The file may have changed while the runs were trained.
        sys.exit(str(error))


def _print_left(made: Sequence[Mapping[str, Any]], failures: int) -> None:
    """Print how many runs have neither ended nor failed, if any."""
    statuses = Counter(line["status"] for line in made)
    left = statuses[NOT_FINISHED] - failures
    if left > 0:
        print(
            f"Of {len(made)} runs {left} have not ended. The same command goes on.", file=sys.stderr
        )


if __name__ == "__main__":
    outlast()
    try:
        main()
    except KeyboardInterrupt:
        print("stopped. The same command goes on.", file=sys.stderr)
        sys.exit(status(signal.SIGINT))
