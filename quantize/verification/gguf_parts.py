"""A GGUF file's containers: its own, or those of all parts where it is one of several.

The first part has the keys, every part some of the tensors. A part that is missing, damaged, or not
the one that its name says is a finding; what the others hold is examined all the same.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...calib.safe_files import DamagedFile
from ..gguf.container import Container, read_container
from ..gguf.reader import MOST_PARTS, PART
from .findings import Finding, finding


class Parts(NamedTuple):
    """containers: of the parts that could be read, in order. complete: whether these are all, each
    in its place."""

    containers: dict[Path, Container]
    complete: bool


def read_parts(path: Path) -> tuple[Parts, list[Finding]]:
    """The containers of the file that `path` is, or is a part of, and what is wrong with them."""
    container, found = _read(path)
    alone = {} if container is None else {path: container}
    name = PART.fullmatch(path.name)
    if container is not None:
        count = container.keys.get("split.count", 1)
    else:
        said = 1 if name is None else int(name[3])
        count = said if 1 <= said <= MOST_PARTS else 1
    if type(count) is not int or not 1 <= count <= MOST_PARTS:
        told = finding("GGUF part", path.name, f"1 to {MOST_PARTS} as split.count", count)
        return Parts(alone, False), [told]
    if count == 1:
        return Parts(alone, not found), found
    if name is None or int(name[3]) != count or not 1 <= int(name[2]) <= count:
        expected = f"a name that ends in -0000N-of-{count:05d}.gguf, N from 1"
        told = finding("GGUF part", path.name, expected, "another: no telling the other parts")
        return Parts(alone, False), [told]
    every = [path.with_name(f"{name[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    return _read_set(every)


def _read_set(paths: list[Path]) -> tuple[Parts, list[Finding]]:
    containers: dict[Path, Container] = {}
    found: list[Finding] = []
    for i, path in enumerate(paths):
        if not path.is_file():
            expected = f"part {i + 1} of {len(paths)}"
            found.append(finding("GGUF part", path.name, expected, "no such file"))
            continue
        container, told = _read(path)
        found += told
        if container is not None:
            containers[path] = container
            found += _misplaced(path, container, i, len(paths))
    found += _twice(containers)
    total = sum(len(c.tensors) for c in containers.values())
    if not found:
        for path, container in containers.items():
            said = container.keys.get("split.tensors.count")
            if said != total:
                expected = f"{total} as split.tensors.count, the tensors of all parts"
                found.append(finding("GGUF part", path.name, expected, said))
    return Parts(containers, not found), found


def _read(path: Path) -> tuple[Container | None, list[Finding]]:
    """The container of one file, None where it is damaged, and how; a tensor's fault names the part
    too."""
    try:
        if not path.stat().st_size:
            raise DamagedFile(path, "truncated", "an empty file", "a GGUF header")
        with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return read_container(data, path), []
    except DamagedFile as e:
        where = path.name if e.tensor is None else f"{e.tensor} ({path.name})"
        return None, [finding("GGUF container", where, e.expected, f"{e.fault}: {e.found}")]


def _misplaced(path: Path, container: Container, number: int, count: int) -> Iterator[Finding]:
    """What the part's own keys say of its place, counted from zero."""
    for key, expected in (("split.no", number), ("split.count", count)):
        said = container.keys.get(key)
        if said != expected:
            yield finding("GGUF part", path.name, f"{expected} as {key}", said)


def _twice(containers: dict[Path, Container]) -> Iterator[Finding]:
    first: dict[str, Path] = {}
    for path, container in containers.items():
        for name in container.tensors:
            if name in first:
                yield finding("GGUF part", name, first[name].name, f"in {path.name} too")
            first.setdefault(name, path)
