"""The shards of a streamed run: laid out first, filled tensor by tensor, resumed after a kill."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from .files import fsync_path, synced
from .raw import Entry, OpenShard, is_begun
from .workspace import partial_folder

FINISHED = "finished.txt"
SYNC_BYTES = 1 << 28  # what a killed run does again at most, beside the tensor in hand


class StreamOutput:
    """Shards (file name -> tensors) in `folder` below a journal's folder.

    `finished`: names of the source's tensors that are on disk in full, as told by `finish`. A name
    is recorded only after the bytes that belong to it are synced.
    """

    def __init__(self, journal: Path, shards: Mapping[str, Sequence[Entry]]) -> None:
        self.folder = journal / "assembled"
        self.folder.mkdir(exist_ok=True)
        self._record = journal / FINISHED
        self._remove_others(set(shards))
        lost = [file for file in shards if not is_begun(self.folder / file, shards[file])]
        if lost:  # nothing was begun, or a shard is damaged: all is made anew
            self._record.unlink(missing_ok=True)
            for file in lost:
                (self.folder / file).unlink(missing_ok=True)
        self.finished = frozenset(_whole_lines(self._record))
        self._shards = [OpenShard(self.folder / file, tensors) for file, tensors in shards.items()]
        fsync_path(self.folder)
        self._of = {
            t.name: s for s, ts in zip(self._shards, shards.values(), strict=True) for t in ts
        }
        self._touched: set[OpenShard] = set()
        self._waiting: list[str] = []
        self._unsynced = 0

    def append(self, name: str, data: bytes) -> None:
        """The next bytes of the tensor `name`."""
        self._of[name].append(name, data)
        self._touched.add(self._of[name])
        self._unsynced += len(data)

    def finish(self, source_name: str) -> None:
        """All that becomes of the source's tensor `source_name` has been appended."""
        self._waiting.append(source_name)
        if self._unsynced >= SYNC_BYTES:
            self._sync()

    def close(self) -> None:
        """Sync the rest. Every tensor must be whole."""
        self._sync()
        for shard in self._shards:
            shard.close()

    def _sync(self) -> None:
        for shard in self._touched:
            shard.sync()
        with synced(self._record, "ab") as f:
            f.write("".join(f"{name}\n" for name in self._waiting).encode())
        self._touched, self._waiting, self._unsynced = set(), [], 0

    def _remove_others(self, shards: set[str]) -> None:
        """What a run left that was killed while it put config and side files beside the shards."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in shards:
                path.unlink()


def unfinished_tensors(out: Path) -> list[str]:
    """Names of the source's tensors that an unfinished streamed run of `out` has finished."""
    record = partial_folder(out) / FINISHED
    return record.read_text("utf-8").split("\n")[:-1] if record.exists() else []


def _whole_lines(record: Path) -> list[str]:
    """Lines of the file that end. The last may have been cut by a kill: it is cut off."""
    if not record.exists():
        return []
    whole = record.read_bytes().rpartition(b"\n")
    with record.open("r+b") as f:
        f.truncate(len(whole[0]) + len(whole[1]))
    return whole[0].decode().split("\n") if whole[1] else []
