"""Download files into one folder: resumed where they were cut off, and checked by hash.

A file is there whole or not at all.
"""

from __future__ import annotations

import hashlib
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
from .folders import default_root
from .unpack import member, unpack, unpacked

TIMEOUT = 30
"""Seconds that a server may be silent."""
PATIENCE = 3600.0
"""Seconds that one file may take in all. Another call continues from there."""
LIMIT = 1 << 30
"""The most bytes of a file whose size is not known."""
BLOCK = 1 << 16
"""Bytes of one read."""
TURN = 0.2
"""Seconds between two looks at the clock."""
SCHEMES = ("http", "https")
SHOWN = 200
"""The most characters of an address that are shown."""

Watch = Callable[["File", int], object]
"""Called with a file and how many of its bytes are there."""


class DataError(RuntimeError):
    """Report a data set that is missing, damaged or out of reach. The message names what to do."""


@dataclass(frozen=True)
class File:
    """Describe one file of a data set.

    Attributes:
        name: in the set's folder, and below the set's address.
        size: in bytes. None if its publisher gives none.
        sha256: the hash. It is a SHA-1, which is shorter, if its publisher gives no SHA-256.
        archive: whether it is unpacked.
        inside: a member of a zip file whose packing does not matter. Size and hash are then that
            member's.
    """

    name: str
    size: int | None
    sha256: str
    archive: bool = False
    inside: str | None = None

    @property
    def kind(self) -> str:
        """Return the name of the hash."""
        if len(self.sha256) == 64:
            return "sha256"
        return "sha1"

    def unpacked(self, folder: Path) -> bool:
        """Return whether it is an archive whose content lies in the folder already."""
        return self.archive and unpacked(folder / self.name).is_dir()


@dataclass(frozen=True)
class DataSet:
    """Describe files that live at one address, and in the folder of the set's name."""

    name: str
    about: str
    home: str
    files: tuple[File, ...]

    @property
    def size(self) -> int:
        """Return the bytes to download, as far as they are known."""
        return sum(file.size or 0 for file in self.files)

    def only(self, *names: str) -> DataSet:
        """Return a set of only these files."""
        return replace(self, files=tuple(file for file in self.files if file.name in names))

    def folder(self, root: Path | None = None) -> Path:
        """Return the folder of its files. An unreadable one raises."""
        folder = (root or default_root()) / self.name
        try:
            folder.exists()
        except OSError as error:
            raise DataError(
                f"cannot read the data folder {folder}: {error.strerror}. "
                "Set CWY_DATA to choose another."
            ) from None
        return folder


def inspect(path: Path, file: File) -> str | None:
    """Return what is wrong with a file, or None if it is there and every byte is right."""
    if not path.is_file():
        return "is missing"
    if file.inside:
        try:
            content = member(path, file.inside, file.size)
        except ValueError as error:
            return f"is no archive of {file.inside}: {error}"
        found = hashlib.sha256(content).hexdigest()
        if found != file.sha256:
            return f"has a {file.inside} of the wrong content, sha256 {found}"
        return None
    if file.size is not None and path.stat().st_size != file.size:
        return f"has {path.stat().st_size} bytes, not {file.size}"
    found = digest(path, file.kind)
    if found != file.sha256:
        return f"has the wrong content, {file.kind} {found}"
    return None


def ensure(dataset: DataSet, root: Path | None = None) -> Path:
    """Return the folder of a data set after checking every file.

    Missing files are fetched. A damaged one raises.
    """
    return fetch(dataset, root, repair=False)


def fetch(
    dataset: DataSet,
    root: Path | None = None,
    watch: Watch = lambda file, done: None,
    *,
    repair: bool = True,
) -> Path:
    """Download the files of a data set that are missing, and return their folder.

    A file has a temporary name until its hash is right. A later attempt continues where an
    earlier one stopped. One of several processes fetches, and the others wait.

    Args:
        dataset: the set.
        root: the folder of all sets.
        watch: is called as the bytes of a file come.
        repair: whether damaged files are downloaded, too. Otherwise they raise.
    """
    folder = dataset.folder(root)
    for file in dataset.files:
        path = folder / file.name
        if file.unpacked(folder):
            continue
        wrong = inspect(path, file)
        if wrong and path.exists() and not repair:
            raise DataError(
                f"{path} {wrong}; expected {file.kind} {file.sha256}. "
                f"Get it anew: cwy data fetch {dataset.name}"
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
                    f"{url} {wrong}; expected {file.kind} {file.sha256}. "
                    "It was deleted: try again, or get it elsewhere."
                )
            _atomic.publish(partial, path)
    except (OSError, HTTPException) as error:
        reason = str(error).removeprefix("<urlopen error ").removesuffix(">")
        raise DataError(
            f"cannot fetch {file.name} from {url}: {reason}.\n"
            f"To use a copy from elsewhere, put it at\n    {path}\n"
            f"({file.kind} {file.sha256}), "
            f"or set CWY_DATA to a folder that holds {path.parent.name}/{file.name}."
        ) from error


class _OnlyWeb(HTTPRedirectHandler):
    """Follow redirects to the web only."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        """Refuse what urllib would follow: an address of another scheme, such as ftp."""
        if urlsplit(newurl).scheme not in SCHEMES:
            raise OSError(f"it leads to {newurl[:SHOWN]!r}, and only http and https are followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Transfer:
    """Download the bytes of one file to its temporary name.

    Attributes:
        most: the most bytes that are taken.
        over: set when the caller no longer waits. Nothing is written from then on.
    """

    def __init__(self, file: File, url: str, partial: Path, watch: Watch) -> None:
        self.file = file
        self.url = url
        self.partial = partial
        self.watch = watch
        self.most = LIMIT
        if file.size is not None:
            self.most = file.size
        self.over = Event()

    def run(self) -> None:
        """Ask until all is there, or an attempt gets no further."""
        if self.file.inside:
            # The length of the archive is not known before, so it comes in one go.
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
        """Ask once for the bytes from ``done`` on. It keeps what arrives before a break."""
        headers = {}
        if done:
            headers["Range"] = f"bytes={done}-"
        # The addresses are those of DATASETS, not a user's.
        request = Request(self.url, headers=headers)  # noqa: S310
        try:
            opened = build_opener(_OnlyWeb).open(request, timeout=TIMEOUT)
        except HTTPError as error:
            # Nothing comes after the bytes that are here: so ends a file of unknown size.
            if error.code == 416:
                return
            raise
        with opened as answer:
            if self.over.is_set():
                return
            mode = "wb"
            if done and answer.status == 206:
                mode = "ab"
            with (
                self.partial.open(mode) as out,
                suppress(ConnectionError, TimeoutError, HTTPException),
            ):
                self._copy(answer, out)
        if self.file.size is None and _size(self.partial) > self.most:
            self.partial.unlink()
            raise OSError(
                f"it is longer than {self.most} bytes, "
                "the most that is taken where the size is not known"
            )

    def _copy(self, answer: HTTPResponse, out: BinaryIO) -> None:
        # One read of the socket at a time, so that slow bytes are counted and the end is noticed.
        while out.tell() <= self.most and (block := answer.read1(BLOCK)):
            if self.over.is_set():
                return
            out.write(block)
            self.watch(self.file, out.tell())


def _within(seconds: float, transfer: _Transfer) -> None:
    """Wait so many seconds for a transfer, however slowly the server answers."""
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
            # In short turns: Windows notices Ctrl-C only between them.
            thread.join(min(TURN, seconds))
    finally:
        transfer.over.set()
    if thread.is_alive():
        raise OSError(
            f"it took longer than {seconds:g} seconds. The bytes that arrived are kept: "
            "fetch again to continue"
        )
    for error in errors:
        raise error


def _size(path: Path) -> int:
    if not path.exists():
        return 0
    return path.stat().st_size


def _ended(partial: Path, file: File, done: int) -> bool:
    if file.size is None:
        return inspect(partial, file) is None
    return done >= file.size


def digest(path: Path, kind: str = "sha256") -> str:
    """Return the hash of a file's bytes."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, kind).hexdigest()
