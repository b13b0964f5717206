"""A small file system of its own, to be filled; needs the right to mount one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# the check of a run's room before it begins is content: another program fills the disk afterwards
FILLED_LATER = "import lowbit.quantize.planning.foresee as f; f.free_disk_bytes = lambda _: 1 << 40"


class SmallDisk:
    """Mounts an empty file system at `place`, anew at each call of `mount`."""

    def __init__(self, place: Path) -> None:
        if sys.platform != "linux" or os.geteuid() != 0:
            pytest.skip("a full disk is made by mounting a small tmpfs: needs root on Linux")
        self.place = place
        self._mounted = False
        place.mkdir()

    def mount(self, kib: int, mode: str = "rw") -> Path:
        """A file system of so many KiB; returns where it is."""
        self.unmount()
        options = f"size={kib}k,{mode}"
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(self.place)]
        made = subprocess.run(command, capture_output=True)
        if made.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {made.stderr.decode().strip()}")
        self._mounted = True
        return self.place

    def enlarge(self) -> None:
        subprocess.run(["mount", "-o", "remount,size=10m", str(self.place)], check=True)

    def unmount(self) -> None:
        if self._mounted:
            subprocess.run(["umount", str(self.place)], check=True)
            self._mounted = False
