"""One command killed at one operation on files, and what is looked at afterwards (kill_bench.py).

The command runs in a process forked from this one, with its operations counted (kill_points.py).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from .kill_points import FileOperations

KILLED = -9


class Scenario(NamedTuple):
    """A command that makes `place`. older: the command that made what it is to replace, if any.

    In the commands, {model}, {packed} and {text} stand for what the bench has made.
    """

    place: str
    command: list[str]
    older: list[str] | None = None


class Ended(NamedTuple):
    """How a command ended: its exit code (negative: the signal), its words, its operations."""

    code: int
    stderr: str
    operations: int
    unsynced: list[str]


class Unbroken(NamedTuple):
    """What a scenario comes to when nothing happens. expected, older: relative path -> SHA-256."""

    operations: int
    expected: dict[str, str]
    older: dict[str, str] | None
    unsynced: list[str]


class Point(NamedTuple):
    """One kill: where, what was there afterwards, and what was wrong with it."""

    kill_at: int
    torn: float
    left: str
    resumed: bool
    faults: list[str]


class KillTrials:
    """Model, text and checkpoint in a scratch folder, and the commands on them."""

    def __init__(self, scratch: Path, packing: list[str]) -> None:
        """packing: the command that makes the checkpoint {packed} of the model."""
        from .tiny_llama import SENTENCE, tiny_llama

        self._scratch = scratch
        self._given = {name: str(scratch / name) for name in ("model", "packed", "text.txt")}
        self._given["text"] = self._given.pop("text.txt")
        tiny_llama(scratch / "model")
        (scratch / "text.txt").write_text(SENTENCE * 40)
        self._make(packing, scratch / "packed")

    def unbroken(self, scenario: Scenario) -> Unbroken:
        """Run the scenario whole, once."""
        folder = self._folder("unbroken")
        older = None
        if scenario.older is not None:
            self._make(scenario.older, folder / scenario.place)
            older = hashes(folder / scenario.place)
            shutil.copytree(folder, self._older(scenario), dirs_exist_ok=True)
        ended = self._run([*scenario.command, "-o", str(folder / scenario.place)])
        if ended.code:
            raise RuntimeError(f"{scenario.command} failed: {ended.stderr}")
        expected = hashes(folder / scenario.place)
        assert expected != older, "the older output is the new one"
        assert called_whole(folder / scenario.place), "a whole output is not called whole"
        return Unbroken(ended.operations, expected, older, ended.unsynced)

    def killed(self, scenario: Scenario, unbroken: Unbroken, kill_at: int, torn: float) -> Point:
        """Kill the scenario at one operation, look at what is there, and run it again."""
        folder = self._folder("killed")
        if scenario.older is not None:
            shutil.copytree(self._older(scenario), folder, dirs_exist_ok=True)
        out = folder / scenario.place
        command = [*scenario.command, "-o", str(out)]
        faults, outputs = [], [unbroken.expected, *([unbroken.older] if unbroken.older else [])]
        ended = self._run(command, FileOperations(kill_at, torn))
        if ended.code != KILLED:
            faults.append(f"was not killed: exit code {ended.code}: {ended.stderr}")
        left = _left(out, unbroken)
        if left == "something else":
            faults.append("the output is neither none, nor the older, nor whole")
        if left == "nothing" and unbroken.older and not _kept(folder, unbroken.older):
            faults.append("the older output is lost before the new one is there")
        for path in called_whole(folder):
            if not is_whole(hashes(path), outputs):
                faults.append(f"{path.relative_to(folder)} is called whole and is not")
        again = self._run([*command, *(["--overwrite"] if left == "whole" else [])])
        if again.code:
            faults.append(f"the same command then failed: {again.stderr.strip()[-300:]}")
        elif hashes(out) != unbroken.expected:
            faults.append("the same command then ended in other bytes")
        if beside := [p.name for p in folder.iterdir() if p != out]:
            faults.append(f"the same command then left {beside} beside the output")
        return Point(kill_at, torn, left, "resuming after" in again.stderr, faults)

    def _make(self, command: list[str], out: Path) -> None:
        ended = self._run([*command, "-o", str(out)])
        if ended.code:
            raise RuntimeError(f"{command} failed: {ended.stderr}")

    def _run(self, command: list[str], operations: FileOperations | None = None) -> Ended:
        """`quantize` with these arguments, in a process of its own."""
        arguments = [a.format_map(self._given) for a in command]
        log, told = self._scratch / "stderr", self._scratch / "told.json"
        told.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            _be_the_command(arguments, operations or FileOperations(), log, told)
        _, status = os.waitpid(pid, 0)
        count, unsynced = json.loads(told.read_text()) if told.exists() else (0, [])
        code = os.waitstatus_to_exitcode(status)
        return Ended(code, log.read_text(errors="replace"), count, unsynced)

    def _folder(self, name: str) -> Path:
        """An empty folder."""
        folder = self._scratch / name
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
        return folder

    def _older(self, scenario: Scenario) -> Path:
        digest = hashlib.sha256(repr(scenario).encode()).hexdigest()
        return self._scratch / f"older-{digest[:8]}"


def hashes(path: Path) -> dict[str, str]:
    """Relative path -> SHA-256 of every file below `path`, or of the file itself."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {str(f.relative_to(path)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def called_whole(folder: Path) -> list[Path]:
    """Checkpoint folders and GGUF files at `folder` and below that `verify` calls whole."""
    from ..kernels.errors import UserError
    from ..quantize import verify

    whole = []
    for path in [folder, *sorted(folder.rglob("*"))]:
        if path.name.endswith(".gguf") and path.is_file() or (path / "config.json").is_file():
            try:
                if verify(path).whole:
                    whole.append(path)
            except UserError:  # cannot even be opened
                continue
    return whole


def is_whole(found: dict[str, str], outputs: list[dict[str, str]]) -> bool:
    """Whether the files are those of one of the outputs; the manifest, which is written after all
    others, may be missing."""
    from ..quantize.checkpoint.manifest import MANIFEST

    return any(
        found.items() <= output.items() and output.keys() - found.keys() <= {MANIFEST}
        for output in outputs
    )


def _left(out: Path, unbroken: Unbroken) -> str:
    if not out.exists():
        return "nothing"
    found = hashes(out)
    if found == unbroken.expected:
        return "whole"
    return "the older output" if found == unbroken.older else "something else"


def _kept(folder: Path, older: dict[str, str]) -> bool:
    """Whether the older output is somewhere below `folder`."""
    return any(hashes(p) == older for p in folder.rglob("*") if p.is_dir())


def _be_the_command(
    arguments: list[str], operations: FileOperations, log: Path, told: Path
) -> None:
    """Run `quantize` in this forked process, and end it."""
    for fd, path in enumerate((Path(os.devnull), Path(os.devnull), log)):
        flags = os.O_RDONLY if fd == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(path, flags, 0o600), fd)
    code = 1
    try:
        from ..quantize.cli import main

        _count_tensors(operations)
        operations.install()
        sys.argv = ["quantize", *arguments]
        main()
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
    fd = os.open(told, os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(fd, json.dumps([operations.count, operations.unsynced]).encode())
    os._exit(code)


def _count_tensors(operations: FileOperations) -> None:
    """numpy writes a GGUF's tensors past Python's file objects."""
    import gguf

    write = gguf.GGUFWriter.write_tensor_data

    @functools.wraps(write)
    def counted(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        def partly(share: float) -> None:
            data = tensor.tobytes()
            self.fout[0].write(data[: int(len(data) * share)])
            self.fout[0].flush()

        operations.next_operation(partly)
        write(self, tensor, *args, **kwargs)
        operations.written(self.fout[0].fileno())

    gguf.GGUFWriter.write_tensor_data = counted
