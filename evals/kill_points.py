"""A process's operations on files, counted, so that it can be killed at a chosen one.

Kills by time land where a program spends its time; its files are in danger in the short whiles in
between. Here every operation that changes a file or a folder is a point by itself: each write that
reaches the system, truncation, fsync, rename, removal and new folder. The functions are replaced in
the process that is to die; the code under test knows nothing of it. A write may be torn: a part of
its bytes are written before the kill.

What is renamed is checked for one thing more: that all of its bytes were fsynced before. (A kill
alone cannot tell, since the system keeps what a killed process wrote; a power cut would.)
"""

from __future__ import annotations

import builtins
import io
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CHANGES = ("truncate", "ftruncate", "unlink", "remove", "rmdir", "mkdir", "rename", "replace")


class FileOperations:
    """Counts the operations of this process from `install` on.

    kill_at: SIGKILL comes in place of the operation of that number, counted from 1. torn: the share
    of its bytes that are written before, where it is a write. unsynced: paths that were renamed, or
    lay in a renamed folder, with bytes that no fsync had made durable.
    """

    def __init__(self, kill_at: int | None = None, torn: float = 0.0) -> None:
        self.count = 0
        self.unsynced: list[str] = []
        self._kill_at, self._torn = kill_at, torn
        self._dirty: set[tuple[int, int]] = set()  # device and inode
        self._open = io.open

    def install(self) -> None:
        """Replace the functions of this process. There is no way back."""
        for name in CHANGES:
            setattr(os, name, self._counted(getattr(os, name), renames=name in CHANGES[-2:]))
        os.fsync = self._fsync(os.fsync)
        builtins.open = io.open = self._opened  # type: ignore[assignment]

    def next_operation(self, partly: Callable[[float], object] = lambda share: None) -> None:
        """Count one operation. partly: what does a share of it."""
        self.count += 1
        if self.count == self._kill_at:
            partly(self._torn)
            os.kill(os.getpid(), signal.SIGKILL)

    def written(self, fd: int) -> None:
        """Bytes of the open file are not durable."""
        self._dirty.add(_identity(os.fstat(fd)))

    def _counted(self, function: Callable[..., Any], renames: bool) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.next_operation()
            if renames:
                self._check_synced(Path(os.fsdecode(args[0])))
            return function(*args, **kwargs)

        return counted

    def _fsync(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(fd: Any) -> None:
            self.next_operation()
            function(fd)
            self._dirty.discard(_identity(os.fstat(fd if isinstance(fd, int) else fd.fileno())))

        return counted

    def _opened(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """`open` whose writes are counted. Read-only files are opened as ever."""
        if not set(mode) & set("wax+") or isinstance(file, int):
            return self._open(file, mode, *args, **kwargs)
        if "w" in mode or "x" in mode:
            self.next_operation()  # the file comes to be, or loses what it held
        raw = _CountedFile(file, mode.replace("b", "").replace("t", ""), operations=self)
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        encoding, newline = kwargs.get("encoding", "utf-8"), kwargs.get("newline")
        return io.TextIOWrapper(buffered, encoding=encoding, newline=newline)

    def _check_synced(self, path: Path) -> None:
        for file in _files(path):
            if _identity(file.stat()) in self._dirty:
                self.unsynced.append(str(file))


class _CountedFile(io.FileIO):
    """The unbuffered file below a buffered one."""

    def __init__(self, file: Any, mode: str, operations: FileOperations) -> None:
        super().__init__(file, mode)
        self._operations = operations

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        plain = super().write
        self._operations.next_operation(lambda share: plain(view[: int(len(view) * share)]))
        self._operations.written(self.fileno())
        return plain(view)

    def truncate(self, size: int | None = None) -> int:
        self._operations.next_operation()
        self._operations.written(self.fileno())
        return super().truncate(size)


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _files(path: Path) -> Iterator[Path]:
    yield from (p for p in path.rglob("*") if p.is_file()) if path.is_dir() else (path,)
