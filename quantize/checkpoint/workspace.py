"""The folder OUT.partial beside an output, in which the output is made by one process at a time.

What makes an output in one go uses `workspace`, which begins with an empty folder and leaves none.
What can go on after a kill keeps a journal in it, see journal.py.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ...kernels.errors import UserError
from .lock import OutputLock, is_lock_file, may_be_lock_file

JOURNAL = "journal.json"
LOCK = "lock"
REPLACED = "replaced"  # an older output, until the new one has its name


def partial_folder(out: Path) -> Path:
    """Where the output `out` is made."""
    return out.with_name(out.name + ".partial")


@contextmanager
def workspace(out: Path) -> Iterator[Path]:
    """An empty folder on the disk of `out`, locked; removed on leaving, whatever happens.

    What a killed process left of `out` is thrown away, but an older output that it was about to
    replace is put back; so it is when this one fails. UserError when another process is at work on
    `out`, or something that is not ours is in the way.
    """
    folder = partial_folder(out)
    if (folder / JOURNAL).exists():
        raise UserError(
            f"{folder} holds an unfinished run; repeat its command to finish it, or remove the "
            "folder to throw it away"
        )
    if folder.exists() and not _is_left_over(folder):
        raise in_the_way(folder)
    lock = lock_folder(folder)
    try:
        _put_back(folder, out)
        empty(folder, kept=(LOCK,))
        yield folder
    finally:
        _put_back(folder, out)
        remove(folder, lock)


def clear_left_over(parent: Path) -> None:
    """Remove the folders OUT.partial in `parent` that killed processes left, but those from whose
    journal a run can go on."""
    for folder in parent.glob("*.partial"):
        if not _is_left_over(folder) or (folder / JOURNAL).exists():
            continue
        try:
            lock = lock_folder(folder)
        except UserError:  # its process is alive
            continue
        remove(folder, lock)


def lock_folder(folder: Path) -> OutputLock:
    """Make the folder where it is not, and lock it; UserError when that cannot be."""
    try:
        return OutputLock(folder / LOCK, folder)
    except OSError as e:
        raise UserError(f"{folder} cannot be made ({e.strerror}); choose another output") from e


def in_the_way(folder: Path) -> UserError:
    return UserError(
        f"{folder}, where the unfinished output is to be kept, holds something else; move it away "
        "or choose another output"
    )


def empty(folder: Path, kept: Collection[str]) -> None:
    """Remove what is in the folder, but what is `kept`: last the journal, by which one knows it."""
    for path in sorted(folder.iterdir(), key=lambda p: p.name == JOURNAL):
        if path.name in kept:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove(folder: Path, lock: OutputLock) -> None:
    """Remove the folder and all in it, the lock last."""
    empty(folder, kept=(LOCK,))
    lock.release()
    try:
        folder.rmdir()
    except OSError as e:  # another process has begun there in between
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


def _put_back(folder: Path, out: Path) -> None:
    if (folder / REPLACED).exists() and not out.exists():
        os.replace(folder / REPLACED, out)


def _is_left_over(folder: Path) -> bool:
    """Whether a killed process of ours left the folder."""
    if not folder.is_dir():
        return False
    if any(path.name != LOCK for path in folder.iterdir()):
        return is_lock_file(folder / LOCK)
    return not (folder / LOCK).exists() or may_be_lock_file(folder / LOCK)
