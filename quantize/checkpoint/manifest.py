"""The manifest of an output folder: size and SHA-256 of every file but itself.

`quantization_manifest.json` is {"version": 1, "files": {path: {"bytes", "sha256"}}}, the paths
relative to the folder with "/" between their parts, in alphabetical order: the same files give the
same bytes. It is the last file that is written, so a folder that holds one was whole when it did;
what has happened to it since, `check_manifest` tells. Files are hashed while they are written; only
shards that are filled out of order, or that a resumed run found begun, are read through once more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from ...calib.safe_files import read_json_object
from ...kernels.errors import UserError
from .files import FileRecord, hash_file, write_text

MANIFEST = "quantization_manifest.json"
VERSION = 1

FaultKind = Literal["missing", "extra", "size", "contents"]


class FileFault(NamedTuple):
    """A file that is not as the manifest says; expected and found: bytes or hashes, for people."""

    file: str
    kind: FaultKind
    expected: str
    found: str


def write_manifest(folder: Path, known: Mapping[str, FileRecord] | None = None) -> None:
    """Write the manifest of all files below `folder`; those that are not `known` are read through.

    known: relative path -> record of what has been written there.
    """
    known = known or {}
    files = {}
    for name in _files(folder):
        record = known[name] if name in known else hash_file(folder / name)
        files[name] = {"bytes": record.nbytes, "sha256": record.sha256}
    text = json.dumps({"version": VERSION, "files": files}, indent=2)
    write_text(folder / MANIFEST, text + "\n")


def read_manifest(folder: Path) -> dict[str, FileRecord] | None:
    """Relative path -> record of each file that the folder was written with; None where there is no
    manifest (another program wrote it).

    UserError when the manifest is damaged, of a later version, or names files outside the folder.
    """
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return None
    value = read_json_object(path)
    if not isinstance(value.get("files"), dict):
        raise _damaged(path, "it has no table of files")
    if value.get("version") != VERSION:
        raise UserError(
            f"{path} is of version {value.get('version')!r}, this lowbit reads {VERSION}; use the "
            "lowbit that wrote it"
        )
    return {name: _record(path, name, entry) for name, entry in value["files"].items()}


def check_manifest(
    folder: Path, manifest: Mapping[str, FileRecord], contents: bool = True
) -> list[FileFault]:
    """What is otherwise in `folder` than `manifest` says, by name; empty when all is as it was.

    contents: hash the files too (all bytes are read); else sizes alone are compared. Files that are
    not in the manifest are named as "extra".
    """
    faults = []
    for name, record in sorted(manifest.items()):
        path = folder / name
        if not path.is_file():
            faults.append(FileFault(name, "missing", f"{record.nbytes} bytes", "no file"))
            continue
        size = path.stat().st_size
        if size != record.nbytes:
            faults.append(FileFault(name, "size", f"{record.nbytes} bytes", f"{size} bytes"))
        elif contents and (found := hash_file(path).sha256) != record.sha256:
            faults.append(FileFault(name, "contents", f"SHA-256 {record.sha256}", found))
    extra = [name for name in _files(folder) if name not in manifest]
    return faults + [FileFault(name, "extra", "no file", "a file") for name in extra]


def _files(folder: Path) -> Iterator[str]:
    """Relative paths of all files below `folder` but the manifest, in alphabetical order."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    yield from sorted(name for name in found if name != MANIFEST)


def _record(path: Path, name: str, entry: Any) -> FileRecord:
    parts = PurePosixPath(name)
    if (
        parts.is_absolute()
        or ".." in parts.parts
        or "\\" in name
        or "\0" in name
        or not parts.parts
    ):
        raise _damaged(path, f"it names '{name}', which is not a file of the folder")
    match entry:
        case {"bytes": int(nbytes), "sha256": str(sha256)}:
            return FileRecord(nbytes, sha256)
    raise _damaged(path, f"'{name}' has no size and hash")


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} is damaged ({why}); make or download the checkpoint again")
