"""The journal of a run: finished layers on disk beside the output, so that a killed run goes on.

A partial folder `OUT.partial` holds journal.json (what is being made, from what) and one
safetensors file with its report for each finished layer. Files are written under a temporary name,
fsynced and renamed: a file that has its name was whole. Its hash is in the report, so that a layer
which was damaged afterwards is made anew. A run that finds a journal of other inputs refuses to mix
and names the difference; one that finds another process at work leaves it alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ...calib.safe_files import INDEX, read_json_object
from ...calib.shards import TensorSource
from ...kernels.errors import UserError
from .files import fsync_path, hash_file, write_text
from .raw import RawTensor, raw_tensors, write_tensors
from .workspace import (
    JOURNAL,
    LOCK,
    REPLACED,
    empty,
    in_the_way,
    lock_folder,
    partial_folder,
    remove,
)

EMPTY = (JOURNAL, f"{JOURNAL}.tmp", LOCK, REPLACED)  # what a run may have that has made nothing yet
ENDING = ".safetensors"  # of a finished layer's file
SHOWN = 4  # differences that a refusal names


class Journal:
    """Finished layers of one run. `resumed`: how many were found when it was opened; `damaged`:
    those that were found and are made anew."""

    def __init__(self, out: Path, identity: dict[str, Any], restart: bool = False) -> None:
        """Open or start the journal of the output folder `out`.

        identity: everything that the output's bytes depend on, as plain JSON values, "model" among
        them (`source_identity`). Raises UserError when work of another identity is there;
        `restart` throws it away instead.
        """
        self._identity = identity
        self.folder = partial_folder(out)
        if self.folder.exists() and not _is_ours(self.folder):
            raise in_the_way(self.folder)
        self._lock = lock_folder(self.folder)
        if restart:
            empty(self.folder, kept=EMPTY)
        path = self.folder / JOURNAL
        there = None if restart else unfinished_identity(out)
        begun = any(p.name not in EMPTY for p in self.folder.iterdir())
        if there is not None and begun:
            self._compare(there, identity)
        elif there != identity:  # a run that ended before it had made anything leaves no claim
            _replace(path, lambda p: write_text(p, json.dumps(identity, indent=2)))
        self.damaged = [layer for layer in self.layers() if not self._is_whole(layer)]
        for layer in self.damaged:
            self.file(layer).unlink()
        self.resumed = len(self.layers())

    def layers(self) -> list[str]:
        """Names of the finished layers."""
        return sorted(p.name.removesuffix(ENDING) for p in self.folder.glob(f"*{ENDING}"))

    def file(self, layer: str) -> Path:
        return self.folder / f"{layer}{ENDING}"

    def finished(self, layer: str) -> bool:
        return self.file(layer).exists()

    def load(self, layer: str) -> dict[str, Tensor]:
        """The tensors of a finished layer."""
        try:
            return load_file(self.file(layer))
        except SafetensorError as e:
            raise _damaged(self.file(layer)) from e

    def stored(self, layer: str) -> list[RawTensor]:
        """Where the tensors of a finished layer lie."""
        try:
            return raw_tensors(self.file(layer))
        except UserError as e:
            raise _damaged(self.file(layer)) from e

    def report(self, layer: str) -> dict[str, Any]:
        """The report of a finished layer, as it was given to `write`."""
        try:
            return read_json_object(self._report_file(layer), INDEX)["report"]
        except (OSError, KeyError, UserError) as e:
            raise _damaged(self._report_file(layer)) from e

    def write(self, layer: str, tensors: dict[str, Tensor], report: dict[str, Any]) -> None:
        """Record a finished layer; the tensors come last, since their file is the sign of it."""

        def write_both(path: Path) -> None:
            told = {"report": report, "sha256": write_tensors(path, tensors).sha256}
            _replace(self._report_file(layer), lambda p: write_text(p, json.dumps(told)))

        _replace(self.file(layer), write_both)

    def keep(self, name: str, value: dict[str, Any]) -> None:
        """Record what was decided before the first layer, as plain JSON values."""
        _replace(self.folder / f"{name}.decided.json", lambda p: write_text(p, json.dumps(value)))

    def kept(self, name: str) -> dict[str, Any] | None:
        """What `keep` was given; None before."""
        path = self.folder / f"{name}.decided.json"
        return _read_json(path) if path.exists() else None

    def check_source(self, source: TensorSource) -> None:
        """UserError when the model's files are not those that the run began with."""
        if source_identity(source) != self._identity["model"]:
            raise UserError(
                f"{source.folder} has changed while the run was at work, so what is finished may "
                "be of two models; --restart begins anew with what is there now"
            )

    @contextmanager
    def told(self) -> Iterator[None]:
        """While the layers are made: a UserError also says what is kept and what can be done with
        it."""
        try:
            yield
        except UserError as e:
            raise UserError(
                f"{e} (what is finished is kept in {self.folder}: the same command goes on there, "
                "--restart begins anew; or remove the folder)"
            ) from e

    def remove(self) -> None:
        """Remove all of it."""
        remove(self.folder, self._lock)

    def _report_file(self, layer: str) -> Path:
        return self.folder / f"{layer}.report.json"

    def _is_whole(self, layer: str) -> bool:
        try:
            told = read_json_object(self._report_file(layer), INDEX)
        except (OSError, UserError):
            return False
        return told.get("sha256") == hash_file(self.file(layer)).sha256 and "report" in told

    def _compare(self, there: dict[str, Any], here: dict[str, Any]) -> None:
        named = _changed_files(there.get("model"), here["model"])
        found = _differences("", {**there, "model": None}, {**here, "model": None})
        if named or found:
            named += [f"{key}: {_short(a)} there, {_short(b)} here" for key, a, b in found]
            more = f"; {len(named) - SHOWN} more" if len(named) > SHOWN else ""
            raise UserError(
                f"{self.folder} holds an unfinished run of other inputs "
                f"({'; '.join(named[:SHOWN])}{more}); repeat that run's command to finish it, or "
                "--restart to throw it away"
            )


def unfinished_identity(out: Path) -> dict[str, Any] | None:
    """The identity of the unfinished run of `out`, None when there is none."""
    path = partial_folder(out) / JOURNAL
    return _read_json(path) if path.exists() else None


def unfinished_layers(out: Path) -> list[str]:
    """Names of the layers that an unfinished run of `out` has finished, whole or damaged since."""
    found = partial_folder(out).glob(f"*{ENDING}")
    return sorted(p.name.removesuffix(ENDING) for p in found)


def source_identity(source: TensorSource) -> dict[str, Any]:
    """What tells one model's files from another's without reading them through.

    UserError when one is not there any more.
    """
    files = sorted({info.file for info in source.info.values()})
    try:
        stats = {f: (source.folder / f).stat() for f in files}
    except FileNotFoundError as e:
        raise UserError(f"{e.filename} is gone; put it back, and the same command goes on") from e
    return {f: {"bytes": s.st_size, "mtime_ns": s.st_mtime_ns} for f, s in stats.items()}


def _is_ours(folder: Path) -> bool:
    """Whether `folder` is an unfinished run's, perhaps killed before it wrote its journal."""
    if not folder.is_dir():
        return False
    left = {p.name for p in folder.iterdir()}
    return (folder / JOURNAL).is_file() or left <= {LOCK, f"{JOURNAL}.tmp"}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, INDEX)
    except (OSError, UserError) as e:
        raise UserError(
            f"{path}, part of an unfinished run, is damaged; --restart throws that run away"
        ) from e


def _damaged(path: Path) -> UserError:
    """Of a finished layer: the next run finds it and makes it anew."""
    return UserError(
        f"{path}, part of an unfinished run, is damaged; give the same command again, which makes "
        "it anew"
    )


def _changed_files(there: Any, here: dict[str, Any]) -> list[str]:
    """In words, which files of the model are not those that a run began with."""
    if not isinstance(there, dict):
        return ["the model: none there"]
    named = [f"the model's {file}: {'not there' if file not in there else 'gone here'}"
             for file in sorted(there.keys() ^ here.keys())]  # fmt: skip
    for file in sorted(there.keys() & here.keys()):
        old, new = there[file], here[file]
        if old == new:
            continue
        if old.get("bytes") != new["bytes"]:
            named.append(f"the model's {file}: {old.get('bytes')} bytes there, {new['bytes']} here")
            continue
        seconds, rest = divmod(int(old.get("mtime_ns", 0)), 10**9)
        named.append(
            f"the model's {file} was written to since, its size is the same; if you know that its "
            f"bytes are too, give it its time back: touch -d @{seconds}.{rest:09d} {file}"
        )
    return named


def _differences(path: str, a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    """Leaves at which two plain values differ, by dotted path."""
    if isinstance(a, dict) and isinstance(b, dict):
        found = []
        for key in [*a, *(k for k in b if k not in a)]:
            inner = f"{path}.{key}" if path else str(key)
            found += _differences(inner, a.get(key), b.get(key))
        return found
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [d for i, (x, y) in pairs for d in _differences(f"{path}[{i}]", x, y)]
    return [] if a == b else [(path, a, b)]


def _short(value: Any) -> str:
    """The value on a line: its beginning and its end where it is long."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:38]}...{text[-38:]}"


def _replace(path: Path, write: Any) -> None:
    """Write under a temporary name, then give the file its name."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    os.replace(temporary, path)
    fsync_path(path.parent)
