"""KTH: 25 people, six actions, four settings; the sequences of each video are listed in ``00sequences.txt``."""

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
    """One video: its name, as in the list, and its sequences, first and last frame counted from 1."""

    name: str
    person: int
    action: str
    ranges: tuple[tuple[int, int], ...]

    @property
    def split(self) -> str:
        """By the person."""
        return next(split for split, persons in PERSONS.items() if self.person in persons)

    def path(self, folder: Path) -> Path:
        """Where it lies."""
        return folder / self.action / f"{self.name}_uncomp.avi"


def listed(folder: Path) -> list[Video]:
    """The videos of the list, in its order, but for those that are left out."""
    path, found = folder / LIST, []
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    for line in lines:
        if match := re.match(r"(person(\d\d)_([a-z]+)_d\d)\s+frames\s+(.*)", line):
            name, person, action, ranges = match.groups()
            spans = tuple((int(a), int(b)) for a, b in re.findall(r"(\d+)-(\d+)", ranges))
            if name not in LEFT_OUT:
                found.append(Video(name, int(person), action, spans))
    if not found:
        raise DataError(f"{path} lists no video. Get it anew: cwy data fetch kth")
    return found


def load(action: str, root: Path | None = None) -> Videos:
    """The sequences of one action, by persons; those of the videos that are here, which may be a part of the set.

    They are decoded once (:func:`~.videos.cached`). Where neither videos nor decoded frames are here, the action is fetched.

    Args:
        action: one of ACTIONS.
        root: the folder that holds ``kth/``; by default ``$CWY_DATA``, or ``cwy`` in the user's cache folder.
    """
    folder = KTH.folder(root)
    if not any(here(folder, action)) and not kept(f"kth-{action}"):
        ensure(KTH.only(LIST, f"{action}.zip"), root)
    videos = list(here(folder, action))
    sources = (
        {LIST: folder / LIST} | {video.name: video.path(folder) for video in videos}
        if videos
        else {}
    )
    return cached(f"kth-{action}", sources, lambda: assemble(_sequences(folder, videos)))


def here(folder: Path, action: str) -> Iterator[Video]:
    """The listed videos of an action that are in a folder."""
    if (folder / LIST).exists():
        yield from (
            video
            for video in listed(folder)
            if video.action == action and video.path(folder).is_file()
        )


def frames(folder: Path, video: Video) -> Tensor:
    """All frames of a video; one that has fewer than its sequences need is refused by name."""
    path, found = video.path(folder), decode(video.path(folder))
    needed = max(last for _, last in video.ranges)
    if len(found) < needed:
        raise DataError(
            f"{path} decodes to {len(found)} frames, and its sequences in {LIST} go to frame {needed}: it is damaged or cut "
            "short. Get it anew, or take it away to go on without it."
        )
    return found


def _sequences(folder: Path, videos: list[Video]) -> dict[str, list[Tensor]]:
    parts: dict[str, list[Tensor]] = {split: [] for split in SPLITS}
    for video in videos:
        grey = frames(folder, video)
        parts[video.split] += [square(grey[first - 1 : last]) for first, last in video.ranges]
    return parts


def statistics(videos: list[Video]) -> dict[str, dict[str, float]]:
    """Of each action that has videos: the shortest, longest and mean sequence, and the frames of each split."""
    found = {}
    for action in ACTIONS:
        lengths = [
            (v.split, last - first + 1)
            for v in videos
            if v.action == action
            for first, last in v.ranges
        ]
        if not lengths:
            continue
        frames = [length for _, length in lengths]
        found[action] = {
            "shortest": min(frames),
            "longest": max(frames),
            "mean": round(sum(frames) / len(frames), 1),
        }
        found[action] |= {
            split: sum(length for part, length in lengths if part == split) for split in SPLITS
        }
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
