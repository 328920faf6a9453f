"""Files from the network into one folder: resumed where they were cut off, checked by hash, there whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urljoin
from urllib.request import Request, urlopen

from filelock import FileLock

from .unpack import member, unpack, unpacked

TIMEOUT = 30
BLOCK = 1 << 16

Watch = Callable[["File", int], object]
"""Is told a file and how many of its bytes are there."""


class DataError(RuntimeError):
    """A data set that is not there, is damaged or can't be had; says what to do."""


@dataclass(frozen=True)
class File:
    """One file of a data set: its name, also below the set's address, its bytes and their hash; an archive is unpacked.

    Where its publisher gives neither size nor SHA-256, the size is None and the hash a SHA-1, told by its length. Of a zip file
    whose packing does not matter, ``inside`` names a member: size and SHA-256 are then that member's.
    """

    name: str
    size: int | None
    sha256: str
    archive: bool = False
    inside: str | None = None

    @property
    def kind(self) -> str:
        """Of the hash."""
        return "sha256" if len(self.sha256) == 64 else "sha1"

    def unpacked(self, folder: Path) -> bool:
        """Whether it is an archive of which the content lies in the folder already: then the archive itself is not needed."""
        return self.archive and unpacked(folder / self.name).is_dir()


@dataclass(frozen=True)
class DataSet:
    """A set of files that live at one address, and in the folder of the set's name."""

    name: str
    about: str
    home: str
    files: tuple[File, ...]

    @property
    def size(self) -> int:
        """Bytes to download, as far as they are known."""
        return sum(file.size or 0 for file in self.files)

    def only(self, *names: str) -> DataSet:
        """The set of these files alone."""
        return replace(self, files=tuple(file for file in self.files if file.name in names))

    def folder(self, root: Path | None = None) -> Path:
        """Where its files are kept; raises if nobody may look there."""
        folder = (root or default_root()) / self.name
        try:
            folder.exists()
        except OSError as error:
            raise DataError(
                f"cannot read the data folder {folder}: {error.strerror}. Set CWY_DATA to choose another."
            ) from None
        return folder


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
    if file.size is not None and path.stat().st_size != file.size:
        return f"has {path.stat().st_size} bytes, not {file.size}"
    found = digest(path, file.kind)
    return None if found == file.sha256 else f"has the wrong content, {file.kind} {found}"


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
        if file.unpacked(folder):
            continue
        wrong = inspect(path, file)
        if wrong and path.exists() and not repair:
            raise DataError(f"{path} {wrong}; expected {file.kind} {file.sha256}. Get it anew: cwy data fetch {dataset.name}")
        if wrong:
            _fetch(file, urljoin(dataset.home, file.name), path, watch)
        watch(file, path.stat().st_size)
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
                    f"{url} {wrong}; expected {file.kind} {file.sha256}. It was deleted: try again, or get it elsewhere."
                )
            os.replace(partial, path)
    except (OSError, HTTPException) as error:
        raise DataError(
            f"cannot fetch {file.name} from {url}: {str(error).removeprefix('<urlopen error ').removesuffix('>')}.\n"
            f"To use a copy from elsewhere, put it at\n    {path}\n"
            f"({file.kind} {file.sha256}), or set CWY_DATA to a folder that holds {path.parent.name}/{file.name}."
        ) from error


def _complete(file: File, url: str, partial: Path, watch: Watch) -> None:
    # An attempt that got further is worth another.
    before = -1
    while before < (done := _size(partial)) and not _ended(partial, file, done):
        before = done
        _continue(file, url, partial, done, watch)
    if file.size is not None and done < file.size:
        raise OSError(f"the connection ended after {done} of {file.size} bytes")


def _continue(file: File, url: str, partial: Path, done: int, watch: Watch) -> None:
    """One request for the bytes from ``done`` on; what comes before the connection ends or breaks is kept."""
    # The addresses are those of DATASETS, not a user's.
    request = Request(url, headers={"Range": f"bytes={done}-"} if done else {})  # noqa: S310
    try:
        opened = urlopen(request, timeout=TIMEOUT)  # noqa: S310
    except HTTPError as error:
        # There is nothing after the bytes that are here: of a file of unknown size, that is how its end is found.
        if error.code == 416:
            return
        raise
    with opened as answer:
        resumed = done and answer.status == 206
        with partial.open("ab" if resumed else "wb") as out, suppress(ConnectionError, TimeoutError, HTTPException):
            while (file.size is None or out.tell() <= file.size) and (block := answer.read(BLOCK)):
                out.write(block)
                watch(file, out.tell())


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _ended(partial: Path, file: File, done: int) -> bool:
    return done >= file.size if file.size is not None else inspect(partial, file) is None


def digest(path: Path, kind: str = "sha256") -> str:
    """The hash of a file's bytes."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, kind).hexdigest()
