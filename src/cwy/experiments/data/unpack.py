"""Unpack archives next to themselves.

One with a member that would land elsewhere is refused before anything is written.
"""

from __future__ import annotations

import os
import tarfile
import zipfile
import zlib
from pathlib import Path
from shutil import rmtree

from filelock import FileLock


def unpacked(archive: Path) -> Path:
    """Return the folder of an archive's content: its name without suffixes."""
    return archive.with_name(archive.name.split(".")[0])


def unpack(archive: Path) -> Path:
    """Unpack a .zip or .tar.* whole or not at all, and return the folder.

    One of several processes unpacks, and the others wait.
    """
    target = unpacked(archive)
    if target.is_dir():
        return target
    with FileLock(archive.with_name(".lock")):
        if not target.is_dir():
            _unpack(archive, target)
    return target


def _unpack(archive: Path, target: Path) -> None:
    work = archive.with_name(f".{target.name}.partial")
    # An attempt that was killed may have left it.
    rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as members:
                _refuse_outsiders(archive, members.namelist(), target)
                members.extractall(work)  # noqa: S202
        else:
            with tarfile.open(archive) as members:
                _refuse_outsiders(archive, members.getnames(), target)
                members.extractall(work, filter="data")
        os.replace(work, target)
    except (tarfile.TarError, zipfile.BadZipFile) as error:
        raise ValueError(f"{archive}: {error}. It is refused.") from error
    finally:
        rmtree(work, ignore_errors=True)


def member(archive: Path, name: str, size: int | None) -> bytes:
    """Return the bytes of one member of a .zip. Their number is checked if it is known."""
    try:
        with zipfile.ZipFile(archive) as members:
            if size not in (None, found := members.getinfo(name).file_size):
                raise ValueError(f"it has {found} bytes, not {size}")
            return members.read(name)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{error}") from error
    except KeyError:
        raise ValueError("it is not in there") from None


def _refuse_outsiders(archive: Path, names: list[str], target: Path) -> None:
    # The extractors would mend some such names silently.
    for name in names:
        if not (target / name).resolve().is_relative_to(target.resolve()):
            raise ValueError(
                f"{archive}: its member {name!r} would be written outside of {target}. "
                "It is refused."
            )
