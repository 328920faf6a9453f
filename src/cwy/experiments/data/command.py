"""``cwy data``: what is known, what is here and whole, and getting what is missing."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from .fetch import DataError, default_root, inspect
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
        parts, what = [(folder / file.name).is_file() or file.unpacked(folder) for file in dataset.files], "files"
        if dataset is KTH and all(parts):
            from . import kth

            parts, what = [video.path(folder).is_file() for video in kth.listed(folder)], "videos"
        state = "yes" if all(parts) else f"{sum(parts)} of {len(parts)} {what}" if any(parts) else "no"
        size = "–" if any(file.size is None for file in dataset.files) else f"{dataset.size / 1e6:.1f} MB"
        table.add_row(dataset.name, state, size, f"{dataset.about}\n{dataset.home}")
    console.print(table)
    console.print(f"Folder: {default_root()} (set CWY_DATA to choose another)", soft_wrap=True)


def check(name: str | None, console: Console) -> bool:
    """Reads every file of a data set, or of all, and compares it with its hash; whether all are here and right."""
    whole = True
    for dataset in [find(name)] if name else DATASETS.values():
        if not name and not dataset.folder().exists():
            whole = False
            console.print(f"{dataset.folder()} is missing, a folder of {len(dataset.files)} files", soft_wrap=True)
            continue
        for file in dataset.files:
            path = dataset.folder() / file.name
            if file.unpacked(dataset.folder()):
                continue
            wrong = inspect(path, file)
            whole &= wrong is None
            console.print(f"{path} {wrong or 'is right'}", soft_wrap=True)
        if dataset is KTH and (dataset.folder() / KTH.files[0].name).is_file():
            whole &= _check_kth(dataset.folder(), console)
    return whole


def _check_kth(folder: Path, console: Console) -> bool:
    """The table of statistics beside the paper's, then every video that is here: whether it has the frames it should."""
    from . import kth

    videos = kth.listed(folder)
    found, table = kth.statistics(videos), Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for action in kth.ACTIONS:
        table.add_column(action, justify="right")
    right = True
    for name, values in kth.PAPER.items():
        ours = {action: found.get(action, {}).get(name, 0) for action in values}
        right &= ours == values
        table.add_row(
            name, *(f"{o:g}" if o == p else f"{o:g}, paper {p:g}" for o, p in zip(ours.values(), values.values(), strict=True))
        )
    console.print("Lengths of sequences in frames, and frames of each split:", end="\n\n")
    console.print(table)
    verdict = "These are the paper's numbers." if right else "They are NOT the paper's."
    console.print(f"{verdict} Left out: {', '.join(f'{name}, {why}' for name, why in kth.LEFT_OUT.items())}.")
    here = [video for video in videos if video.path(folder).is_file()]
    wrong = []
    for video in here:
        try:
            kth.frames(folder, video)
        except DataError as error:
            if find_spec("av") is None:
                raise
            wrong.append(video)
            console.print(str(error), soft_wrap=True)
    console.print(f"{len(here)} of {len(videos)} videos are here, {len(here) - len(wrong)} of them whole.")
    return right and not wrong and len(here) == len(videos)


def decode(name: str, console: Console) -> None:
    """Decodes the videos that are here of a data set into the frames that tasks train from, and says where these are."""
    from . import kth, weizmann
    from .videos import frames_root

    sets = {"kth": (kth.ACTIONS, kth.load), "weizmann": (weizmann.ACTIONS, weizmann.load)}
    if name not in sets:
        raise DataError(f"data set {find(name).name!r} has no videos. Those that have: {', '.join(sets)}.")
    actions, load = sets[name]
    for action in actions:
        videos = load(action)
        counts = ", ".join(f"{split} {len(spans)} sequences" for split, spans in videos.sequences.items())
        console.print(f"{frames_root() / f'{name}-{action}.safetensors'}: {counts}", soft_wrap=True)


def fetch(name: str, console: Console) -> None:
    """Downloads what is missing of a data set, and says where it is."""
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
    console.print(f"Every file is here and right: {folder}", soft_wrap=True)
