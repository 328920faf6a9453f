"""Files from the network into one folder: resumed where they were cut off, checked by hash, there whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import BinaryIO
from urllib.error import HTTPError
from urllib.parse import urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from filelock import FileLock

from ... import _atomic
from .unpack import member, unpack, unpacked

TIMEOUT = 30
"""Seconds that a server may be silent."""
PATIENCE = 3600.0
"""Seconds that one file may take in all. What has come by then is kept, and another call goes on from there."""
LIMIT = 1 << 30
"""The most bytes of a file whose size is not known."""
BLOCK = 1 << 16
TURN = 0.2
SCHEMES = ("http", "https")
SHOWN = 200
"""The most characters of an address that are shown."""

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
        return (
            None
            if found == file.sha256
            else f"has a {file.inside} of the wrong content, sha256 {found}"
        )
    if file.size is not None and path.stat().st_size != file.size:
        return f"has {path.stat().st_size} bytes, not {file.size}"
    found = digest(path, file.kind)
    return None if found == file.sha256 else f"has the wrong content, {file.kind} {found}"


def ensure(dataset: DataSet, root: Path | None = None) -> Path:
    """The folder of a data set, every file checked; those that are missing are fetched, a damaged one is refused."""
    return fetch(dataset, root, repair=False)


def fetch(
    dataset: DataSet,
    root: Path | None = None,
    watch: Watch = lambda file, done: None,
    *,
    repair: bool = True,
) -> Path:
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
            raise DataError(
                f"{path} {wrong}; expected {file.kind} {file.sha256}. Get it anew: cwy data fetch {dataset.name}"
            )
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
        if partial.is_symlink():
            partial.unlink()
        with FileLock(path.with_name(".lock")):
            if inspect(path, file) is None:
                return
            _within(PATIENCE, _Transfer(file, url, partial, watch))
            if wrong := inspect(partial, file):
                partial.unlink()
                raise DataError(
                    f"{url} {wrong}; expected {file.kind} {file.sha256}. It was deleted: try again, or get it elsewhere."
                )
            _atomic.publish(partial, path)
    except (OSError, HTTPException) as error:
        raise DataError(
            f"cannot fetch {file.name} from {url}: {str(error).removeprefix('<urlopen error ').removesuffix('>')}.\n"
            f"To use a copy from elsewhere, put it at\n    {path}\n"
            f"({file.kind} {file.sha256}), or set CWY_DATA to a folder that holds {path.parent.name}/{file.name}."
        ) from error


class _OnlyWeb(HTTPRedirectHandler):
    """Follow redirects to the web only."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        """Refuse what urllib would follow: an address of another scheme, such as ftp."""
        if urlsplit(newurl).scheme not in SCHEMES:
            raise OSError(f"it leads to {newurl[:SHOWN]!r}, and only http and https are followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Transfer:
    """The bytes of one file on their way to its temporary name.

    Attributes:
        over: set when nobody waits for it any more; nothing is written from then on.
    """

    def __init__(self, file: File, url: str, partial: Path, watch: Watch) -> None:
        self.file, self.url, self.partial, self.watch = file, url, partial, watch
        self.most = LIMIT if file.size is None else file.size
        self.over = Event()

    def run(self) -> None:
        """Ask until all is there, or an attempt gets no further."""
        if self.file.inside:
            # How long the archive is nobody knows before: it comes in one go.
            self._continue(0)
            return
        before = -1
        done = _size(self.partial)
        while before < done and not _ended(self.partial, self.file, done):
            before = done
            self._continue(done)
            done = _size(self.partial)
        if self.file.size is not None and done < self.file.size:
            raise OSError(f"the connection ended after {done} of {self.file.size} bytes")

    def _continue(self, done: int) -> None:
        """Ask once for the bytes from ``done`` on; what comes before the connection ends or breaks is kept."""
        # The addresses are those of DATASETS, not a user's.
        request = Request(self.url, headers={"Range": f"bytes={done}-"} if done else {})  # noqa: S310
        try:
            opened = build_opener(_OnlyWeb).open(request, timeout=TIMEOUT)
        except HTTPError as error:
            # There is nothing after the bytes that are here: of a file of unknown size, that is how its end is found.
            if error.code == 416:
                return
            raise
        with opened as answer:
            if self.over.is_set():
                return
            resumed = done and answer.status == 206
            with (
                self.partial.open("ab" if resumed else "wb") as out,
                suppress(ConnectionError, TimeoutError, HTTPException),
            ):
                self._copy(answer, out)
        if self.file.size is None and _size(self.partial) > self.most:
            self.partial.unlink()
            raise OSError(
                f"it is longer than {self.most} bytes, the most that is taken where the size is not known"
            )

    def _copy(self, answer: HTTPResponse, out: BinaryIO) -> None:
        # One read of the socket at a time: bytes that drip in are seen, and the end of patience is too.
        while out.tell() <= self.most and (block := answer.read1(BLOCK)):
            if self.over.is_set():
                return
            out.write(block)
            self.watch(self.file, out.tell())


def _within(seconds: float, transfer: _Transfer) -> None:
    """Wait for a transfer, but no longer: no server keeps the caller, however slowly it answers."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            transfer.run()
        except BaseException as error:
            errors.append(error)

    # A thread, because nothing else ends a name lookup, a handshake or headers that drip in.
    thread = Thread(target=work, daemon=True)
    thread.start()
    end = monotonic() + seconds
    try:
        while thread.is_alive() and monotonic() < end:
            # In short turns: Windows hears of Ctrl-C only between them.
            thread.join(min(TURN, seconds))
    finally:
        transfer.over.set()
    if thread.is_alive():
        raise OSError(
            f"it took longer than {seconds:g} seconds. What has come is kept: fetch again to go on"
        )
    for error in errors:
        raise error


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _ended(partial: Path, file: File, done: int) -> bool:
    return done >= file.size if file.size is not None else inspect(partial, file) is None


def digest(path: Path, kind: str = "sha256") -> str:
    """The hash of a file's bytes."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, kind).hexdigest()
