"""KTH: 25 people, six actions, four settings.

``00sequences.txt`` lists the sequences of each video.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from .fetch import DataError, ensure
from .sets import KTH
from .videos import SPLITS, Videos, assemble, cached, decode, kept, square

ACTIONS = ("walking", "jogging", "running", "boxing", "handwaving", "handclapping")
PERSONS = {"train": range(1, 13), "validation": range(13, 17), "test": range(17, 26)}
LIST = "00sequences.txt"
LEFT_OUT = {"person01_boxing_d4": "known to be corrupt"}
"""Videos that are published and not used."""


@dataclass(frozen=True)
class Video:
    """Describe one video of the list.

    Attributes:
        name: as in the list.
        person, action: who does what.
        ranges: first and last frame of each sequence, counted from 1.
    """

    name: str
    person: int
    action: str
    ranges: tuple[tuple[int, int], ...]

    @property
    def split(self) -> str:
        """Return the split, which the person decides."""
        return next(split for split, persons in PERSONS.items() if self.person in persons)

    def path(self, folder: Path) -> Path:
        """Return where it lies."""
        return folder / self.action / f"{self.name}_uncomp.avi"


def listed(folder: Path) -> list[Video]:
    """Return the videos of the list, in its order, without those that are left out."""
    path = folder / LIST
    found = []
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    for line in lines:
        if match := re.match(r"(person(\d\d)_([a-z]+)_d\d)\s+frames\s+(.*)", line):
            name, person, action, ranges = match.groups()
            pairs = re.findall(r"(\d+)-(\d+)", ranges)
            spans = tuple((int(first), int(last)) for first, last in pairs)
            if name not in LEFT_OUT:
                found.append(Video(name, int(person), action, spans))
    if not found:
        raise DataError(f"{path} lists no video. Get it anew: cwy data fetch kth")
    return found


def load(action: str, root: Path | None = None) -> Videos:
    """Return the sequences of one action, by persons.

    They are those of the videos that are here, which may be a part of the set, decoded once
    (:func:`~.videos.cached`). The action is fetched if neither videos nor decoded
    frames are here.

    Args:
        action: one of ACTIONS.
        root: the folder that holds ``kth/``, by default :func:`~.folders.default_root`.
    """
    folder = KTH.folder(root)
    if not any(here(folder, action)) and not kept(f"kth-{action}"):
        ensure(KTH.only(LIST, f"{action}.zip"), root)
    videos = list(here(folder, action))
    sources = {}
    if videos:
        sources = {LIST: folder / LIST} | {video.name: video.path(folder) for video in videos}
    return cached(f"kth-{action}", sources, lambda: assemble(_sequences(folder, videos)))


def here(folder: Path, action: str) -> Iterator[Video]:
    """Yield the listed videos of an action that are in a folder."""
    if not (folder / LIST).exists():
        return
    for video in listed(folder):
        if video.action == action and video.path(folder).is_file():
            yield video


def frames(folder: Path, video: Video) -> Tensor:
    """Return all frames of a video. One with fewer than its sequences need raises by name."""
    path = video.path(folder)
    found = decode(path)
    needed = max(last for _, last in video.ranges)
    if len(found) < needed:
        raise DataError(
            f"{path} decodes to {len(found)} frames, and its sequences in {LIST} "
            f"go to frame {needed}: it is damaged or cut short. "
            "Get it anew, or take it away to go on without it."
        )
    return found


def _sequences(folder: Path, videos: list[Video]) -> dict[str, list[Tensor]]:
    parts: dict[str, list[Tensor]] = {split: [] for split in SPLITS}
    for video in videos:
        gray = frames(folder, video)
        parts[video.split] += [square(gray[first - 1 : last]) for first, last in video.ranges]
    return parts


def statistics(videos: list[Video]) -> dict[str, dict[str, float]]:
    """Return the lengths of each action's sequences, and the frames of each split."""
    found = {}
    for action in ACTIONS:
        lengths: dict[str, list[int]] = {split: [] for split in SPLITS}
        for video in videos:
            if video.action == action:
                lengths[video.split] += [last - first + 1 for first, last in video.ranges]
        every = [length for theirs in lengths.values() for length in theirs]
        if not every:
            continue
        found[action] = {
            "shortest": min(every),
            "longest": max(every),
            "mean": round(sum(every) / len(every), 1),
        }
        found[action] |= {split: sum(theirs) for split, theirs in lengths.items()}
    return found


PAPER = {
    name: dict(zip(ACTIONS, values, strict=True))
    for name, values in {
        "shortest": (62, 42, 26, 42, 62, 24),
        "longest": (231, 152, 111, 362, 245, 235),
        "mean": (109.3, 68.0, 48.9, 110.3, 129.0, 106.2),
        "train": (20122, 12730, 9096, 20515, 23958, 19529),
        "validation": (7622, 4551, 3448, 7558, 8436, 6415),
        "test": (15991, 9913, 7018, 15277, 18963, 16125),
    }.items()
}
"""The paper's table of statistics."""
