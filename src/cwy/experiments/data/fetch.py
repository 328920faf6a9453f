"""Files from the network into one folder: resumed where they were cut off, checked by hash, there whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import Request, urlopen

from filelock import FileLock

from .unpack import member, unpack

TIMEOUT = 30
BLOCK = 1 << 16

Watch = Callable[["File", int], object]
"""Is told a file and how many of its bytes are there."""


class DataError(RuntimeError):
    """A data set that is not there, is damaged or can't be had; says what to do."""


@dataclass(frozen=True)
class File:
    """One file of a data set: its name, also below the set's address, its bytes and their SHA-256; an archive is unpacked.

    Of a zip file whose packing does not matter, ``inside`` names a member: size and SHA-256 are then that member's.
    """

    name: str
    size: int
    sha256: str
    archive: bool = False
    inside: str | None = None


@dataclass(frozen=True)
class DataSet:
    """A set of files that live at one address, and in the folder of the set's name."""

    name: str
    about: str
    home: str
    files: tuple[File, ...]

    @property
    def size(self) -> int:
        """Bytes to download."""
        return sum(file.size for file in self.files)

    def folder(self, root: Path | None = None) -> Path:
        """Where its files are kept."""
        return (root or default_root()) / self.name


def default_root() -> Path:
    """The folder of all data sets: ``$CWY_DATA``, or ``cwy`` in the user's cache folder."""
    if named := os.environ.get("CWY_DATA"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cwy"


def inspect(path: Path, file: File) -> str | None:
    """What is wrong with a file: None if it is there and every byte is right."""
    if not path.is_file():
        return "is missing"
    if file.inside:
        try:
            content = member(path, file.inside, file.size)
        except ValueError as error:
            return f"is no archive of {file.inside}: {error}"
        found = hashlib.sha256(content).hexdigest()
        return None if found == file.sha256 else f"has a {file.inside} of the wrong content, sha256 {found}"
    if path.stat().st_size != file.size:
        return f"has {path.stat().st_size} bytes, not {file.size}"
    found = _sha256(path)
    return None if found == file.sha256 else f"has the wrong content, sha256 {found}"


def ensure(dataset: DataSet, root: Path | None = None) -> Path:
    """The folder of a data set, every file checked; those that are missing are fetched, a damaged one is refused."""
    return fetch(dataset, root, repair=False)


def fetch(dataset: DataSet, root: Path | None = None, watch: Watch = lambda file, done: None, *, repair: bool = True) -> Path:
    """Downloads the files of a data set that are missing, or damaged if ``repair``; returns their folder.

    A file comes under a temporary name, goes on where an earlier attempt stopped, and gets its own name once its hash is right.
    Of several processes one fetches, the others wait for it.
    """
    folder = dataset.folder(root)
    for file in dataset.files:
        path = folder / file.name
        wrong = inspect(path, file)
        if wrong and path.exists() and not repair:
            raise DataError(f"{path} {wrong}; expected sha256 {file.sha256}. Get it anew: cwy data fetch {dataset.name}")
        if wrong:
            _fetch(file, urljoin(dataset.home, file.name), path, watch)
        watch(file, file.size)
        if file.archive:
            try:
                unpack(path)
            except ValueError as error:
                raise DataError(str(error)) from error
    return folder


def _fetch(file: File, url: str, path: Path, watch: Watch) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(".lock")):
            if inspect(path, file) is None:
                return
            if file.inside:
                # How long the archive is nobody knows before: it comes in one go.
                _continue(file, url, partial, 0, watch)
            else:
                _complete(file, url, partial, watch)
            if wrong := inspect(partial, file):
                partial.unlink()
                raise DataError(
                    f"{url} {wrong}; expected sha256 {file.sha256}. It was deleted: try again, or get it elsewhere."
                )
            os.replace(partial, path)
    except (OSError, HTTPException) as error:
        raise DataError(
            f"cannot fetch {file.name} from {url}: {str(error).removeprefix('<urlopen error ').removesuffix('>')}.\n"
            f"To use a copy from elsewhere, put it at\n    {path}\n"
            f"(sha256 {file.sha256}), or set CWY_DATA to a folder that holds {path.parent.name}/{file.name}."
        ) from error


def _complete(file: File, url: str, partial: Path, watch: Watch) -> None:
    # An attempt that got further is worth another.
    before = -1
    while before < (done := _size(partial)) < file.size:
        before = done
        _continue(file, url, partial, done, watch)
    if done < file.size:
        raise OSError(f"the connection ended after {done} of {file.size} bytes")


def _continue(file: File, url: str, partial: Path, done: int, watch: Watch) -> None:
    """One request for the bytes from ``done`` on; what comes before the connection ends or breaks is kept."""
    # The addresses are those of DATASETS, not a user's.
    request = Request(url, headers={"Range": f"bytes={done}-"} if done else {})  # noqa: S310
    with urlopen(request, timeout=TIMEOUT) as answer:  # noqa: S310
        resumed = done and answer.status == 206
        with partial.open("ab" if resumed else "wb") as out, suppress(ConnectionError, TimeoutError, HTTPException):
            while out.tell() <= file.size and (block := answer.read(BLOCK)):
                out.write(block)
                watch(file, out.tell())


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
