"""Files that are on disk once they are said to be, and hashed while they are written.

A file's bytes are fsynced before the function that writes it returns; a folder's entries are when
`fsync_path` does. Renaming a file or a folder afterwards publishes it whole or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from ...kernels.errors import UserError

COPY_BYTES = 1 << 22
_MORE_SPACE = "free some or choose another place"
_OTHER_PLACE = "choose a place that you may use"
REMEDIES = {
    errno.ENOSPC: _MORE_SPACE, errno.EDQUOT: _MORE_SPACE, errno.EACCES: _OTHER_PLACE,
    errno.EPERM: _OTHER_PLACE, errno.EROFS: _OTHER_PLACE, errno.EEXIST: _OTHER_PLACE,
    errno.ENOTDIR: _OTHER_PLACE, errno.EISDIR: _OTHER_PLACE,
    errno.ENAMETOOLONG: "choose a shorter name",
}  # fmt: skip


class FileRecord(NamedTuple):
    """What a file's bytes come to."""

    nbytes: int
    sha256: str


class HashedWriter:
    """A file that is written from its start to its end. `record`: of what it holds up to now."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash, self._nbytes = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._nbytes += len(data)

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._nbytes, self._hash.hexdigest())


@contextmanager
def synced(path: Path, mode: Literal["wb", "ab"] = "wb") -> Iterator[BinaryIO]:
    """`path` opened to be written or added to, and fsynced when it is whole; an OSError names it.

    UserError when its folder is not there any more.
    """
    try:
        with path.open(mode) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
    except FileNotFoundError as e:
        if path.parent.exists():
            raise
        raise UserError(
            f"{path.parent} was removed while it was written to; give the command again"
        ) from e
    except OSError as e:
        e.filename = e.filename or str(path)
        raise


@contextmanager
def synced_and_hashed(path: Path) -> Iterator[HashedWriter]:
    """The same for a file that is written in one go; its `record` is whole on leaving."""
    with synced(path) as f:
        yield HashedWriter(f)


def explained(e: OSError) -> str | None:
    """What went wrong with which file and what to do about it; None where that is not known."""
    number, said = e.errno, e.strerror
    if number is None and "requested and" in str(e):  # numpy's, for a write that was cut short
        number, said = errno.ENOSPC, os.strerror(errno.ENOSPC)
    if number not in REMEDIES:
        return None
    place = e.filename2 or e.filename
    return f"{said}{f': {place}' if place else ''}; {REMEDIES[number]}"


def write_text(path: Path, text: str) -> FileRecord:
    """Write and fsync a text file."""
    with synced_and_hashed(path) as f:
        f.write(text.encode("utf-8"))
    return f.record


def copy_file(source: Path, target: Path) -> FileRecord:
    """Copy the bytes of `source`, and fsync them."""
    with source.open("rb") as data, synced_and_hashed(target) as f:
        while piece := data.read(COPY_BYTES):
            f.write(piece)
    return f.record


def hash_file(path: Path) -> FileRecord:
    """Read a file through, a few megabytes at a time."""
    digest, nbytes = hashlib.sha256(), 0
    with path.open("rb") as data:
        while piece := data.read(COPY_BYTES):
            digest.update(piece)
            nbytes += len(piece)
    return FileRecord(nbytes, digest.hexdigest())


def fsync_path(path: Path) -> None:
    """Make a file's bytes or a folder's entries durable: a rename is, once its folder is synced."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
