"""Two processes on one output: the second is told who the first is, and nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest
from lowbit.kernels.errors import UserError
from lowbit.quantize.checkpoint import lock as lock_module
from lowbit.quantize.checkpoint.journal import Journal
from lowbit.quantize.checkpoint.lock import OutputLock, is_lock_file
from lowbit.quantize.checkpoint.workspace import workspace

from .command import Commands

pytest.importorskip("fcntl", reason="no file locks on this system")
HOLD = """
import sys
from pathlib import Path
from lowbit.quantize.checkpoint.lock import OutputLock
lock = OutputLock(Path(sys.argv[1]), Path(sys.argv[1]).parent)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock file until the context is left or it is killed."""
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()


COMMANDS = {
    "run": ("run", "out", ["--method", "gptq"]),
    "a streamed run": ("run", "out", ["--method", "rtn"]),
    "a run begun anew": ("run", "out", ["--method", "rtn", "--restart"]),
    "export": ("export", "out.gguf", ["--type", "F16"]),
    "convert": ("convert", "out", ["--to", "plain"]),
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_the_owner_is_named(
    kind: str,
    shallow: Path,
    shallow_packed: Path,
    calibration: list[str],
    command: Commands,
    tmp_path: Path,
) -> None:
    name, place, options = COMMANDS[kind]
    source = shallow_packed if kind == "convert" else shallow
    out, partial = tmp_path / place, tmp_path / f"{place}.partial"
    options += calibration if "gptq" in options else []
    with another_process(partial / "lock") as owner:
        command(name, source, "-o", out, *options).refuses(
            "another run is at work", str(partial), f"process {owner.pid} on ", ", since 20"
        )
        assert [p.name for p in partial.iterdir()] == ["lock"]
    assert command(name, source, "-o", out, *options).code == 0
    assert [p.name for p in tmp_path.iterdir()] == [place]


def test_a_lock_ends_with_its_owner(tmp_path: Path) -> None:
    with another_process(tmp_path / "lock") as owner:
        with pytest.raises(UserError, match=f"process {owner.pid} on"):
            OutputLock(tmp_path / "lock", tmp_path)
        owner.kill()
        owner.wait()
        held = OutputLock(tmp_path / "lock", tmp_path)
    assert is_lock_file(tmp_path / "lock")
    held.release()
    assert not any(tmp_path.iterdir())


def test_a_lock_file_removed_while_it_is_taken_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock on a file that has lost its name would keep nobody out."""
    lock_file = lock_module._lock

    def removed_at_first(file: BinaryIO) -> bool:
        monkeypatch.setattr(lock_module, "_lock", lock_file)
        (tmp_path / "lock").unlink()  # by the owner before, between our opening and locking it
        return lock_file(file)

    monkeypatch.setattr(lock_module, "_lock", removed_at_first)
    held = OutputLock(tmp_path / "lock", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")], capture_output=True, text=True
    )
    assert done.returncode == 1 and f"process {os.getpid()} on" in done.stderr
    held.release()


def test_a_workspace_throws_away_what_a_killed_process_left(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with another_process(tmp_path / "out.partial" / "lock") as owner:
        (tmp_path / "out.partial" / "half").write_text("written")
        owner.kill()
        owner.wait()
    with workspace(out) as folder:
        assert [p.name for p in folder.iterdir()] == ["lock"]
        (folder / "mine").mkdir()
    assert not any(tmp_path.iterdir())


def test_an_older_output_is_put_back_when_the_new_one_fails(tmp_path: Path) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    out.mkdir()
    (out / "old").touch()
    with another_process(partial / "lock") as owner:
        out.rename(partial / "replaced")  # as far as a killed process had come
        owner.kill()
        owner.wait()
    with pytest.raises(ZeroDivisionError), workspace(out) as folder:
        assert (out / "old").exists() and [p.name for p in folder.iterdir()] == ["lock"]
        out.rename(folder / "replaced")
        raise ZeroDivisionError
    assert (out / "old").exists() and not partial.exists()


def test_a_workspace_leaves_alone_what_is_not_its_own(tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    for name, said in (("lock", "holds something else"), ("journal.json", "an unfinished run")):
        (partial / name).write_text("dear to me")
        with pytest.raises(UserError, match=said), workspace(tmp_path / "out"):
            pass
        assert (partial / name).read_text() == "dear to me"


def test_a_journal_goes_even_if_another_process_begins_as_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "out", {"a": 1})
    release = OutputLock.release

    def begun_in_between(self: OutputLock) -> None:
        release(self)
        (tmp_path / "out.partial" / "lock").touch()

    monkeypatch.setattr(OutputLock, "release", begun_in_between)
    journal.remove()
    assert (tmp_path / "out.partial" / "lock").exists()
