"""What this machine has: memory, room on a disk."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from pathlib import Path


def resident_bytes() -> int:
    """Bytes of memory that this process holds (on systems without /proc: has held at most)."""
    status = _fields(Path("/proc/self/status"))
    if "VmRSS" in status:
        return status["VmRSS"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_bytes() -> int | None:
    """Bytes of memory that could be taken without swapping; None where the system does not say."""
    return _fields(Path("/proc/meminfo")).get("MemAvailable")


def free_disk_bytes(folder: Path) -> int:
    """Free bytes where `folder` lies."""
    return shutil.disk_usage(folder).free


def keeps_files(folder: Path) -> bool:
    """Whether one may write in `folder`, and it lies on something that has room for files at all:
    /proc and the like have none."""
    return os.access(folder, os.W_OK) and shutil.disk_usage(folder).total > 0


def _fields(path: Path) -> dict[str, int]:
    """The sizes that a file of /proc lists, in bytes; nothing where there is no such file."""
    if not path.is_file():
        return {}
    lines = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {
        words[0].rstrip(":"): int(words[1]) * 1024
        for words in lines
        if len(words) == 3 and words[2] == "kB"
    }
