"""List, check, fetch and decode the data sets, as ``cwy data`` does."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from .fetch import DataError, DataSet, inspect
from .fetch import fetch as download
from .folders import default_root, frames_root
from .sets import DATASETS, KTH, find

if TYPE_CHECKING:
    from . import kth


def show(console: Console) -> None:
    """Print the data sets, and which are here."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("set", no_wrap=True)
    table.add_column("here?", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("what, and from where", overflow="fold")
    for dataset in DATASETS.values():
        size = f"{dataset.size / 1e6:.1f} MB"
        if any(file.size is None for file in dataset.files):
            size = "–"
        table.add_row(dataset.name, _here(dataset), size, f"{dataset.about}\n{dataset.home}")
    console.print(table)
    _print_folder(console)


def _here(dataset: DataSet) -> str:
    """Return how much of a data set is here, in words."""
    folder = dataset.folder()
    kind = "files"
    parts = [(folder / file.name).is_file() or file.unpacked(folder) for file in dataset.files]
    if dataset is KTH and all(parts):
        from . import kth

        kind = "videos"
        parts = [video.path(folder).is_file() for video in kth.listed(folder)]
    if all(parts):
        return "yes"
    if any(parts):
        return f"{sum(parts)} of {len(parts)} {kind}"
    return "no"


def _print_folder(console: Console) -> None:
    console.print(f"Folder: {default_root()} (set CWY_DATA to choose another)", soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Checked:
    """Hold what a check found of one data set.

    Attributes:
        right: how many parts are as they should be.
        parts: how many there should be.
        kind: what the parts are, in words.
        hindered: what else is wrong.
    """

    right: int
    parts: int
    kind: str
    hindered: str = ""

    @property
    def whole(self) -> bool:
        """Return whether every part is here and right."""
        return self.right == self.parts and not self.hindered


def check(name: str | None, console: Console) -> bool:
    """Compare every file of a data set, or of all, with its hash. Return whether all are right.

    Wrong files are printed by name, and at the end a summary of every set.
    """
    chosen = list(DATASETS.values())
    if name:
        chosen = [find(name)]
    found = {dataset: _check(dataset, console) for dataset in chosen}
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("set", no_wrap=True)
    table.add_column("whole?", no_wrap=True)
    table.add_column("right", no_wrap=True)
    table.add_column("what else is wrong", overflow="fold")
    for dataset, checked in found.items():
        state = "NO"
        if checked.whole:
            state = "yes"
        right = f"{checked.right} of {checked.parts} {checked.kind}"
        table.add_row(dataset.name, state, right, checked.hindered)
    console.print(table)
    _print_folder(console)
    return all(checked.whole for checked in found.values())


def _check(dataset: DataSet, console: Console) -> Checked:
    folder = dataset.folder()
    if not folder.exists():
        return Checked(0, len(dataset.files), "files", "the folder is missing")
    right = 0
    for file in dataset.files:
        path = folder / file.name
        wrong = None
        if not file.unpacked(folder):
            wrong = inspect(path, file)
        if wrong is None:
            right += 1
        else:
            console.print(f"{path} {wrong}", soft_wrap=True)
    if dataset is KTH and (folder / KTH.files[0].name).is_file():
        try:
            return _check_kth(folder, console)
        except DataError as error:
            return Checked(right, len(dataset.files), "files", str(error))
    return Checked(right, len(dataset.files), "files")


def _check_kth(folder: Path, console: Console) -> Checked:
    """Print the statistics of KTH, and check the frames of every video that is here."""
    from . import kth

    videos = kth.listed(folder)
    hindered = ""
    if not _compare_kth(videos, console):
        hindered = f"{kth.LIST} does not give the paper's numbers"
    here = [video for video in videos if video.path(folder).is_file()]
    if find_spec("av") is None:
        console.print(f"{len(here)} of {len(videos)} videos are here, none of them decoded.")
        missing = 'decoding them needs PyAV: pip install "cwy[video]"'
        return Checked(0, len(videos), "videos", missing)
    whole = 0
    for video in here:
        try:
            kth.frames(folder, video)
        except DataError as error:
            console.print(str(error), soft_wrap=True)
        else:
            whole += 1
    console.print(f"{len(here)} of {len(videos)} videos are here, {whole} of them whole.")
    return Checked(whole, len(videos), "videos", hindered)


def _compare_kth(videos: list[kth.Video], console: Console) -> bool:
    """Print the statistics of KTH next to the paper's. Return whether they agree."""
    from . import kth

    found = kth.statistics(videos)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for action in kth.ACTIONS:
        table.add_column(action, justify="right")
    agree = True
    for name, papers in kth.PAPER.items():
        cells = []
        for action, paper in papers.items():
            ours = found.get(action, {}).get(name, 0)
            cell = f"{ours:g}"
            if ours != paper:
                agree = False
                cell += f", paper {paper:g}"
            cells.append(cell)
        table.add_row(name, *cells)
    console.print("KTH: lengths of sequences in frames, and frames of each split:", end="\n\n")
    console.print(table)
    verdict = "They are NOT the paper's."
    if agree:
        verdict = "These are the paper's numbers."
    left_out = ", ".join(f"{name}, {why}" for name, why in kth.LEFT_OUT.items())
    console.print(f"{verdict} Left out: {left_out}.")
    return agree


def decode(name: str, console: Console) -> None:
    """Decode the videos of a data set into the frames that tasks train from, and print where."""
    from . import kth, weizmann

    sets = {"kth": (kth.ACTIONS, kth.load), "weizmann": (weizmann.ACTIONS, weizmann.load)}
    if name not in sets:
        raise DataError(
            f"data set {find(name).name!r} has no videos. Those that have: {', '.join(sets)}."
        )
    actions, load = sets[name]
    for action in actions:
        videos = load(action)
        counts = ", ".join(
            f"{split} {len(spans)} sequences" for split, spans in videos.sequences.items()
        )
        console.print(f"{frames_root() / f'{name}-{action}.safetensors'}: {counts}", soft_wrap=True)


def fetch(name: str, console: Console) -> bool:
    """Download what is missing of a data set. Return whether all of it is here."""
    dataset = find(name)
    bars = Progress(
        TextColumn("{task.description:28}"),
        BarColumn(bar_width=20),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        transient=True,
    )
    with bars:
        ids = {file: bars.add_task(file.name, total=file.size) for file in dataset.files}
        folder = download(dataset, watch=lambda file, done: bars.update(ids[file], completed=done))
    if dataset is KTH and not _has_all_of_kth(folder, console):
        return False
    console.print(f"Every file is here and right: {folder}", soft_wrap=True)
    return True


def _has_all_of_kth(folder: Path, console: Console) -> bool:
    """Return whether every video of KTH is here. Print which are missing."""
    from . import kth

    videos = kth.listed(folder)
    missing = [video for video in videos if not video.path(folder).is_file()]
    if not missing:
        return True
    here = len(videos) - len(missing)
    console.print(f"{here} of {len(videos)} videos are here: {folder}", soft_wrap=True)
    actions = ", ".join(sorted({video.action for video in missing}))
    console.print(f"Videos are missing in: {actions}.")
    console.print("An action that has a folder is not downloaded.")
    console.print("To get the rest, move these folders away and fetch again.")
    return False
