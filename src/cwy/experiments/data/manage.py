"""``cwy data``: what is known, what is here and whole, and getting what is missing."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from .fetch import DataError, DataSet, default_root, inspect
from .fetch import fetch as download
from .sets import DATASETS, KTH, find


def show(console: Console) -> None:
    """The data sets, and which are here."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("set", no_wrap=True)
    table.add_column("here?", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("what, and from where", overflow="fold")
    for dataset in DATASETS.values():
        folder = dataset.folder()
        parts, what = (
            [(folder / file.name).is_file() or file.unpacked(folder) for file in dataset.files],
            "files",
        )
        if dataset is KTH and all(parts):
            from . import kth

            parts, what = [video.path(folder).is_file() for video in kth.listed(folder)], "videos"
        state = (
            "yes" if all(parts) else f"{sum(parts)} of {len(parts)} {what}" if any(parts) else "no"
        )
        size = (
            "–"
            if any(file.size is None for file in dataset.files)
            else f"{dataset.size / 1e6:.1f} MB"
        )
        table.add_row(dataset.name, state, size, f"{dataset.about}\n{dataset.home}")
    console.print(table)
    console.print(f"Folder: {default_root()} (set CWY_DATA to choose another)", soft_wrap=True)


@dataclass(frozen=True)
class Checked:
    """What a check found of one data set: the parts that are right, those there should be, and what hindered it."""

    right: int
    parts: int
    kind: str
    hindered: str = ""

    @property
    def whole(self) -> bool:
        return self.right == self.parts and not self.hindered


def check(name: str | None, console: Console) -> bool:
    """Compare every file of a data set, or of all, with its hash; return whether all are here and right.

    What is wrong is printed by name, and at the end a summary of every set.
    """
    chosen = [find(name)] if name else list(DATASETS.values())
    found = {dataset: _check(dataset, console) for dataset in chosen}
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("set", no_wrap=True)
    table.add_column("whole?", no_wrap=True)
    table.add_column("right", no_wrap=True)
    table.add_column("what else is wrong", overflow="fold")
    for dataset, checked in found.items():
        state = "yes" if checked.whole else "NO"
        right = f"{checked.right} of {checked.parts} {checked.kind}"
        table.add_row(dataset.name, state, right, checked.hindered)
    console.print(table)
    console.print(f"Folder: {default_root()} (set CWY_DATA to choose another)", soft_wrap=True)
    return all(checked.whole for checked in found.values())


def _check(dataset: DataSet, console: Console) -> Checked:
    folder = dataset.folder()
    if not folder.exists():
        return Checked(0, len(dataset.files), "files", "the folder is missing")
    right = 0
    for file in dataset.files:
        path = folder / file.name
        wrong = None if file.unpacked(folder) else inspect(path, file)
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
    """The table of statistics beside the paper's, then every video that is here: whether it has the frames it should."""
    from . import kth

    videos = kth.listed(folder)
    found, table = kth.statistics(videos), Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for action in kth.ACTIONS:
        table.add_column(action, justify="right")
    papers = True
    for name, values in kth.PAPER.items():
        ours = {action: found.get(action, {}).get(name, 0) for action in values}
        papers &= ours == values
        table.add_row(
            name,
            *(
                f"{o:g}" if o == p else f"{o:g}, paper {p:g}"
                for o, p in zip(ours.values(), values.values(), strict=True)
            ),
        )
    console.print("KTH: lengths of sequences in frames, and frames of each split:", end="\n\n")
    console.print(table)
    verdict = "These are the paper's numbers." if papers else "They are NOT the paper's."
    console.print(
        f"{verdict} Left out: {', '.join(f'{name}, {why}' for name, why in kth.LEFT_OUT.items())}."
    )
    here = [video for video in videos if video.path(folder).is_file()]
    if find_spec("av") is None:
        console.print(f"{len(here)} of {len(videos)} videos are here, none of them decoded.")
        return Checked(
            0, len(videos), "videos", 'decoding them needs PyAV: pip install "cwy[video]"'
        )
    wrong = []
    for video in here:
        try:
            kth.frames(folder, video)
        except DataError as error:
            wrong.append(video)
            console.print(str(error), soft_wrap=True)
    console.print(
        f"{len(here)} of {len(videos)} videos are here, {len(here) - len(wrong)} of them whole."
    )
    unlike = "" if papers else f"{kth.LIST} does not give the paper's numbers"
    return Checked(len(here) - len(wrong), len(videos), "videos", unlike)


def decode(name: str, console: Console) -> None:
    """Decodes the videos that are here of a data set into the frames that tasks train from, and says where these are."""
    from . import kth, weizmann
    from .videos import frames_root

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
    """Download what is missing of a data set, print where it is, and return whether all of it is there."""
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
    if dataset is KTH:
        from . import kth

        missing = [video for video in kth.listed(folder) if not video.path(folder).is_file()]
        if missing:
            parts = ", ".join(sorted({video.action for video in missing}))
            every = len(kth.listed(folder))
            console.print(
                f"{every - len(missing)} of {every} videos are here: {folder}", soft_wrap=True
            )
            console.print(f"Videos are missing in: {parts}.")
            console.print("An action that has a folder is not downloaded.")
            console.print("To get the rest, move these folders away and fetch again.")
            return False
    console.print(f"Every file is here and right: {folder}", soft_wrap=True)
    return True
