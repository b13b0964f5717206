"""Files, shard index and safetensors headers: what holds the tensors, before any is looked at."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ...calib.safe_files import INDEX as INDEX_LIMITS
from ...calib.safe_files import DamagedFile, is_plain_name, lies_in, read_json_object
from ...calib.safetensors_file import Header, read_header
from ...calib.shards import INDEX
from ...kernels.errors import UserError
from ..checkpoint.manifest import MANIFEST, check_manifest, read_manifest
from ..checkpoint.side_files import OF_ITS_OWN
from .findings import Finding, finding
from .side_files import JSON_FILES, TEMPLATES, TOKENIZERS

NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MOST_FILES = 100_000
READ = {*OF_ITS_OWN, *TOKENIZERS, *JSON_FILES, *TEMPLATES, "merges.txt"}  # beside the weights
KINDS = {
    "missing": "file missing", "extra": "file extra", "size": "file changed",
    "contents": "file changed",
}  # fmt: skip


class Structure(NamedTuple):
    """findings, and the headers of the weight files that could be read."""

    findings: list[Finding]
    headers: dict[str, Header]


def examine_structure(folder: Path) -> Structure:
    """Every fault of the folder's files, index and headers. No tensor is read; where lowbit left a
    manifest, all files are, to be hashed."""
    found = [*_links(folder), *_pickles(folder)]
    headers: dict[str, Header] = {}
    files = sorted(p.name for p in folder.glob("*.safetensors") if lies_in(p, folder))
    for file in files:
        try:
            headers[file] = read_header(folder / file)
        except DamagedFile as e:
            fault = "pickle" if e.fault == "pickle" else "damaged file"
            where = file if e.tensor is None else f"{e.tensor} ({file})"
            found.append(finding(fault, where, e.expected, f"{e.fault}: {e.found}"))
    if not files:
        found.append(
            finding("file missing", "model.safetensors", "weights", "no .safetensors file")
        )
    found += _twice(headers)
    found += _index(folder, files, headers)
    found += _manifest(folder)
    return Structure(found, headers)


def _links(folder: Path) -> Iterator[Finding]:
    """Links that lead out of the folder, wherever they stand in it."""
    for i, (at, folders, files) in enumerate(os.walk(folder)):
        if i > MOST_FILES:
            raise UserError(f"{folder} holds more than {MOST_FILES:,} folders; it is no checkpoint")
        for name in (*folders, *files):
            path = Path(at) / name
            if path.is_symlink() and not lies_in(path, folder):
                where = path.relative_to(folder).as_posix()
                yield finding(
                    "link out of the folder", where, "a file", f"a link to {os.readlink(path)}"
                )


def _pickles(folder: Path) -> Iterator[Finding]:
    """Pickled weights where no others are; beside safetensors nobody reads them."""
    if any(folder.glob("*.safetensors")):
        return
    for path in sorted(folder.iterdir()):
        if path.suffix in PICKLED:
            yield finding("pickle", path.name, "safetensors", "pickled weights alone")


def _twice(headers: dict[str, Header]) -> Iterator[Finding]:
    first: dict[str, str] = {}
    for file, header in headers.items():
        for name in header.tensors:
            if name in first:
                yield finding("tensor twice", name, first[name], f"{first[name]} and {file}")
            first.setdefault(name, file)


def _index(folder: Path, files: list[str], headers: dict[str, Header]) -> Iterator[Finding]:
    """The index against the files, and files against each other where there is none."""
    if not os.path.lexists(folder / INDEX):
        yield from _without_index(files)
        return
    try:
        index = read_json_object(folder / INDEX, INDEX_LIMITS)
    except UserError as e:
        yield finding("JSON", INDEX, "a safetensors index", e)
        return
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        yield finding("index", INDEX, "weight_map, from names to files", type(weight_map).__name__)
        return
    named = sorted(set(weight_map.values()))
    for file in named:
        if not is_plain_name(file):
            yield finding("index", INDEX, "names of files in the folder", repr(file))
        elif file not in files:
            yield finding("file missing", file, "a shard that the index names", "no such file")
    for file in files:
        if file not in named:
            yield finding("index", file, "to be named in the index", "no tensor of it is")
    stored = {name: file for file, header in headers.items() for name in header.tensors}
    yield from _placement(weight_map, stored, set(headers))
    yield from _total_size(index, headers, whole=len(headers) == len(files))


def _placement(
    weight_map: dict[str, str], stored: dict[str, str], readable: set[str]
) -> Iterator[Finding]:
    """Where the index puts each tensor against where it is."""
    for name, file in weight_map.items():
        if file in readable and stored.get(name) != file:
            where = stored.get(name, "in no file")
            yield finding("index", name, f"in {file}, as the index says", where)
    for name, file in stored.items():
        if name not in weight_map:
            yield finding("index", name, "to be listed in the index", f"in {file} alone")


def _total_size(
    index: dict[str, Any], headers: dict[str, Header], whole: bool
) -> Iterator[Finding]:
    """metadata.total_size, where it is given and every header could be read."""
    metadata = index.get("metadata")
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = sum(t.nbytes for header in headers.values() for t in header.tensors.values())
    if whole and said is not None and said != total:
        yield finding("index size", INDEX, f"total_size {total}", said)


def _without_index(files: list[str]) -> Iterator[Finding]:
    for file in files:
        numbered = NUMBERED.fullmatch(file)
        if numbered is None:
            continue
        stem, _, count = numbered.groups()
        if int(count) > MOST_FILES:
            yield finding("file missing", file, f"at most {MOST_FILES} shards", int(count))
            continue
        shards = {f"{stem}-{i:05d}-of-{count}.safetensors" for i in range(1, int(count) + 1)}
        for missing in sorted(shards - set(files)):
            yield finding("file missing", missing, f"{int(count)} shards", "no such file")
        break
    if files and "model.safetensors" not in files:
        yield finding("no index", INDEX, "an index of the shards", f"{len(files)} files without")


def _manifest(folder: Path) -> Iterator[Finding]:
    """The folder against the manifest that lowbit left in it. A file that it does not list is one
    too many, or is part of the checkpoint and nothing vouches for it."""
    try:
        manifest = read_manifest(folder)
    except UserError as e:
        yield finding("JSON", MANIFEST, "a manifest of the files", e)
        return
    if manifest is None:
        return
    for fault in check_manifest(folder, manifest):
        if fault.kind == "extra" and _is_read(fault.file):
            yield finding("file not listed", fault.file, f"an entry in {MANIFEST}", "no entry")
        else:
            yield finding(KINDS[fault.kind], fault.file, fault.expected, fault.found)


def _is_read(file: str) -> bool:
    """Whether readers of the folder load this file of it: weights, their index, config.json,
    tokenizer and the like."""
    return file in READ or ("/" not in file and file.endswith(".safetensors"))
