"""Time and memory of a whole command, as the operating system counts them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

# A new process counts its parent's peak as its own, so a small parent stands between
LAUNCHER = """
import json, os, subprocess, sys, time
start = time.perf_counter()
process = subprocess.Popen(sys.argv[2:])
_, status, usage = os.wait4(process.pid, 0)
cost = [time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss]
with open(sys.argv[1], "w") as file:
    json.dump([os.waitstatus_to_exitcode(status), cost], file)
"""
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of what getrusage counts in
SHOWN = 12  # lines of a failed command's output


class ProcessCost(NamedTuple):
    """Wall and CPU seconds and peak resident bytes of one command."""

    seconds: float
    cpu_seconds: float
    peak_memory: int


class CommandFailed(Exception):
    """A command ended with another exit code than 0; the message ends with its last lines."""


def run_command(command: list[str], log: Path) -> ProcessCost:
    """Run `command`, its output into the file `log`. Raises CommandFailed."""
    with tempfile.TemporaryDirectory() as scratch, log.open("wb") as out:
        told = Path(scratch) / "cost.json"
        launch = [sys.executable, "-I", "-c", LAUNCHER, str(told), *command]
        subprocess.run(launch, stdout=out, stderr=subprocess.STDOUT, check=True)
        code, (seconds, cpu_seconds, peak) = json.loads(told.read_text())
    if code != 0:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-SHOWN:]
        raise CommandFailed(f"exit code {code}: " + "\n".join(last))
    return ProcessCost(seconds, cpu_seconds, peak * RSS_UNIT)
