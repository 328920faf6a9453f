"""``cwy data``: what is known, what is here and whole, and getting what is missing."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from .fetch import default_root, inspect
from .fetch import fetch as download
from .sets import DATASETS, find


def show(console: Console) -> None:
    """The data sets, and which are here."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("set", no_wrap=True)
    table.add_column("here?", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("what, and from where", overflow="fold")
    for dataset in DATASETS.values():
        here = sum((dataset.folder() / file.name).is_file() for file in dataset.files)
        state = "yes" if here == len(dataset.files) else f"{here} of {len(dataset.files)} files" if here else "no"
        table.add_row(dataset.name, state, f"{dataset.size / 1e6:.1f} MB", f"{dataset.about}\n{dataset.home}")
    console.print(table)
    console.print(f"Folder: {default_root()} (set CWY_DATA to choose another)", soft_wrap=True)


def check(name: str | None, console: Console) -> bool:
    """Reads every file of a data set, or of all, and compares it with its hash; whether all are here and right."""
    whole = True
    for dataset in [find(name)] if name else DATASETS.values():
        for file in dataset.files:
            path = dataset.folder() / file.name
            wrong = inspect(path, file)
            whole &= wrong is None
            console.print(f"{path} {wrong or 'is right'}", soft_wrap=True)
    return whole


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
