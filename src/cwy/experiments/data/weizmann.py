"""Weizmann: nine people, ten actions. Every video is one sequence."""

from __future__ import annotations

from pathlib import Path

from .fetch import ensure
from .sets import WEIZMANN
from .videos import Videos, assemble, cached, decode, kept, square

ACTIONS = ("walk", "run", "jump", "side", "bend", "wave1", "wave2", "pjump", "jack", "skip")
PERSONS = {
    "train": ("daria", "denis", "eli", "ido", "ira"),
    "validation": ("lena", "lyova"),
    "test": ("moshe", "shahar"),
}


def load(action: str, root: Path | None = None) -> Videos:
    """Return the sequences of one action, by persons.

    They are fetched if neither videos nor decoded frames are here.
    """
    folder = WEIZMANN.folder(root)
    name = f"weizmann-{action}"
    paths = {
        split: [folder / action / f"{person}_{action}.avi" for person in persons]
        for split, persons in PERSONS.items()
    }
    every = [path for theirs in paths.values() for path in theirs]
    if any(path.is_file() for path in every) or not kept(name):
        ensure(WEIZMANN.only(*(f"{action}/{path.name}" for path in every)), root)
    sources = {path.name: path for path in every if path.is_file()}

    def make() -> Videos:
        parts = {
            split: [square(decode(path)) for path in theirs] for split, theirs in paths.items()
        }
        return assemble(parts)

    return cached(name, sources, make)
