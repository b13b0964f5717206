"""Read a GGUF file: metadata as a plain dict, tensors one at a time and dequantized.

Its table of contents is read and checked at once (container.py), a tensor's bytes when it is asked
for, so the memory that a reader needs is that of the tensor in hand.
"""

from __future__ import annotations

import mmap
import re
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from ...kernels.errors import UserError
from .blocks import CODECS
from .container import WHAT, Container, StoredTensor, read_container

PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
MOST_PARTS = 1000  # that are opened


class GGUFFile:
    """A GGUF file opened for reading: `keys`, `tensors` by name, `get(name)`.

    `path` is the file, or any part of one that was cut; `paths`: all parts in order. UserError when
    a file is missing, damaged, not GGUF, or no part of the others.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        first = _open(self.path)
        self.paths = _parts(self.path, first.keys)
        self.tensors: dict[str, StoredTensor] = {}
        self._paths: dict[str, Path] = {}
        self.keys: dict[str, Any] = {}
        for i, part in enumerate(self.paths):
            container = first if part == self.path else _open(part)
            if len(self.paths) > 1:
                _check_part(part, container, i, len(self.paths))
            if i == 0:
                self.keys = container.keys
            if twice := self.tensors.keys() & container.tensors.keys():
                raise UserError(f"{part} holds '{min(twice)}', as a part before it does")
            self.tensors |= container.tensors
            self._paths |= dict.fromkeys(container.tensors, part)
        expected = self.keys.get("split.tensors.count", len(self.tensors))
        if expected != len(self.tensors):
            raise UserError(
                f"the parts of {self.path} hold {len(self.tensors)} tensors, not {expected}"
            )

    @property
    def nbytes(self) -> int:
        """The size of all parts on disk."""
        return sum(path.stat().st_size for path in self.paths)

    def get(self, name: str) -> Tensor:
        """The tensor `name` in float32, dequantized."""
        stored = self.tensors[name]
        return dequantized(self.path, name, stored, read_rows(self._paths[name], stored))

    def get_matrix(self, name: str, index: int) -> Tensor:
        """The matrix `index` of the stack `name` of three dimensions, in float32, dequantized."""
        stored = self.tensors[name]
        rows = stored.shape[-2]
        one = stored._replace(shape=stored.shape[1:], nbytes=stored.nbytes // stored.shape[0])
        data = read_rows(self._paths[name], stored, index * rows, (index + 1) * rows)
        return dequantized(self.path, name, one, data)


def _open(path: Path) -> Container:
    if not path.is_file():
        raise UserError(f"no such GGUF file: {path}")
    if not path.stat().st_size:
        raise UserError(f"{path} {WHAT} (it is empty); download it again")
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return read_container(data, path)


def _parts(path: Path, keys: dict[str, Any]) -> list[Path]:
    """All parts of the file that `path` is one of."""
    count = keys.get("split.count", 1)
    if count == 1:
        return [path]
    name = PART.fullmatch(path.name)
    if not isinstance(count, int) or not 1 < count <= MOST_PARTS or name is None:
        raise UserError(
            f"{path} is one of {count} parts; give them their names, "
            "NAME-00001-of-0000N.gguf, or join them with llama-gguf-split --merge"
        )
    if int(name[3]) != count:
        raise UserError(f"{path} is one of {count} parts, which its name does not say")
    return [path.with_name(f"{name[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]


def _check_part(path: Path, container: Container, number: int, count: int) -> None:
    found = container.keys.get("split.no"), container.keys.get("split.count")
    if found != (number, count):
        raise UserError(f"{path} is part {found[0]} of {found[1]}, not {number} of {count}")


def read_rows(path: Path, stored: StoredTensor, start: int = 0, stop: int | None = None) -> Tensor:
    """The bytes of rows `start` to `stop` (all dimensions but the last counted as one), uint8
    [rows, bytes]."""
    rows = prod(stored.shape[:-1])
    width = stored.nbytes // rows
    stop = rows if stop is None else min(stop, rows)
    data = np.fromfile(path, np.uint8, (stop - start) * width, offset=stored.start + start * width)
    if len(data) < (stop - start) * width:
        raise UserError(f"{path} became shorter while it was read")
    return torch.from_numpy(data).view(stop - start, width)


def dequantized(path: Path, name: str, stored: StoredTensor, rows: Tensor) -> Tensor:
    """The float32 values of the tensor `name` of `path`, from all of its bytes."""
    if stored.kind in CODECS:
        return CODECS[stored.kind].decode(rows).view(stored.shape)
    try:
        kind = gguf.GGMLQuantizationType[stored.kind]
        values = gguf.quants.dequantize(rows.numpy(), kind)
    except NotImplementedError as e:
        raise UserError(f"{path}: tensor '{name}' has type {stored.kind}: {e}") from e
    return torch.from_numpy(np.ascontiguousarray(values)).view(stored.shape)
