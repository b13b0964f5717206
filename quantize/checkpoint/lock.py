"""One process at a time works on an output: a lock that dies with its owner, and names it.

The lock is the operating system's, on a small file beside the output that says who holds it. It
ends with the process, however that ends, so nothing is left that a person would have to remove; the
file by itself locks nothing.
"""

from __future__ import annotations

import json
import os
import socket
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO

from ...kernels.errors import UserError

BEGINNING = b'{"pid": '  # of every lock file


class OutputLock:
    """A held lock, from the making of this object until `release` or the end of the process."""

    def __init__(self, path: Path, output: Path) -> None:
        """Take the lock file `path` for the work on `output`; its folder is made where it is not.

        UserError, which names the process, its host and since when it has been at work, when
        another one holds it. (Where files cannot be locked, as on some network file systems,
        nothing is.)
        """
        self._path = path
        while True:
            path.parent.mkdir(exist_ok=True)
            try:
                self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
            except FileNotFoundError:  # its last owner removed the folder in between
                continue
            if not _lock(self._file):
                self._file.seek(0)
                owner = _owner(self._file.read(1 << 12))
                self._file.close()
                raise UserError(
                    f"another run is at work in {output}{owner}; wait for it or choose another "
                    "output"
                )
            if _is_still(self._file, path):  # else its last owner removed it in between
                break
            self._file.close()
        self._file.write(json.dumps(_this_process()).encode())
        self._file.flush()
        self._file.truncate()  # afterwards: the file begins as a lock file does at all times

    def release(self) -> None:
        """Remove the lock file and let go of it."""
        self._path.unlink(missing_ok=True)
        self._file.close()


def is_lock_file(path: Path) -> bool:
    """Whether `path` is a lock file that an OutputLock has written, held or not."""
    return path.is_file() and _start(path) == BEGINNING


def may_be_lock_file(path: Path) -> bool:
    """Whether it is one, or was killed before it had written it whole."""
    return path.is_file() and BEGINNING.startswith(_start(path))


def _start(path: Path) -> bytes:
    with path.open("rb") as f:
        return f.read(len(BEGINNING))


def _lock(file: BinaryIO) -> bool:
    """Whether the file is now ours; True where the system has no such locks."""
    try:
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except (ImportError, OSError):
        return True
    return True


def _is_still(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _this_process() -> dict[str, str | int]:
    now = datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": now}


def _owner(written: bytes) -> str:
    """Who holds a lock file of this content, in words; empty where it does not say."""
    try:
        match json.loads(written):
            case {"pid": int(pid), "host": str(host), "since": str(since)}:
                return f" (process {pid} on {host}, since {since})"
    except ValueError:
        pass
    return ""
