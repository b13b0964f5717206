"""Run `quantize` in a process of its own and look at what came back."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "COLUMNS": "120",
    "NO_COLOR": "1",
    "TERM": "dumb",
}
COMMANDS = ("plan", "run", "inspect", "generate", "eval", "export")  # those that take a model
Asked = Callable[[str | Path], list[str | Path]]  # from a model to a command's arguments
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Outcome(NamedTuple):
    """What a command left: its exit code (negative: the signal that ended it), both streams."""

    code: int
    stdout: str
    stderr: str

    @property
    def message(self) -> str:
        """The one line by which the command refuses; fails when there is none or more, or when a
        traceback or anything after it is shown."""
        lines = self.stderr.strip().splitlines()
        said = [line for line in lines if line.startswith("quantize: ")]
        assert "Traceback" not in self.stderr, self.stderr
        assert len(said) == 1, self.stderr
        assert lines[-1] == said[0], self.stderr
        return said[0].removeprefix("quantize: ")

    def refuses(self, *parts: str) -> str:
        """The message of a refusal (exit code 2), which must hold every one of `parts`."""
        assert self.code == 2, (self.code, self.stderr)
        message = self.message
        for part in parts:
            assert part in message, f"'{part}' is not in: {message}"
        return message


class Commands:
    """Forks commands off a process that has torch imported (tests/zygote.py)."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        self._answer()

    def __call__(
        self,
        *args: str | Path,
        cwd: Path | None = None,
        kill_at: tuple[str, str, int] | None = None,
        before: str = "",
    ) -> Outcome:
        """Run `quantize args`; kill_at: where it is to be killed (see tests/zygote.py); before:
        code that its process runs first."""
        stdout, stderr = self._scratch / "stdout", self._scratch / "stderr"
        request = {
            "args": [str(a) for a in args],
            "cwd": str(cwd or self._scratch),
            "stdout": str(stdout),
            "stderr": str(stderr),
            "kill_at": kill_at,
            "before": before,
        }
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        code = self._answer()["code"]
        return Outcome(code, stdout.read_text(), COLOURS.sub("", stderr.read_text()))

    def close(self) -> None:
        self._server.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, "the process that runs the commands has died"
        return json.loads(line)


def in_new_interpreter(*args: str | Path, before: str = "") -> Outcome:
    """Run `quantize args` in an interpreter of its own; before: code that it runs first."""
    code = f"{before}\nfrom lowbit.quantize.cli import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )
    return Outcome(done.returncode, done.stdout, COLOURS.sub("", done.stderr))
