"""Read a GGUF file: metadata as a plain dict, tensors one at a time and dequantized.

Its table of contents is read and checked at once (container.py), a tensor's bytes when it is asked
for, so the memory that a reader needs is that of the tensor in hand.
"""

from __future__ import annotations

import mmap
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from ...kernels.errors import UserError
from .container import WHAT, StoredTensor, read_container
from .mix import CODECS


class GGUFFile:
    """A GGUF file opened for reading: `keys`, `tensors` by name, `get(name)`.

    UserError when the file is missing, damaged, not GGUF, or one part of several.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise UserError(f"no such GGUF file: {self.path}")
        if not self.path.stat().st_size:
            raise UserError(f"{self.path} {WHAT} (it is empty); download it again")
        with self.path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            container = read_container(data, self.path)
        self.keys: dict[str, Any] = container.keys
        self.tensors: dict[str, StoredTensor] = container.tensors
        parts = self.keys.get("split.count", 1)
        if not isinstance(parts, int) or parts > 1:
            raise UserError(
                f"{self.path} is one of {parts} parts; join them with llama-gguf-split --merge "
                "first"
            )

    def get(self, name: str) -> Tensor:
        """The tensor `name` in float32, dequantized."""
        stored = self.tensors[name]
        return dequantized(self.path, name, stored, read_rows(self.path, stored))

    def get_matrix(self, name: str, index: int) -> Tensor:
        """The matrix `index` of the stack `name` of three dimensions, in float32, dequantized."""
        stored = self.tensors[name]
        rows = stored.shape[-2]
        one = stored._replace(shape=stored.shape[1:], nbytes=stored.nbytes // stored.shape[0])
        data = read_rows(self.path, stored, index * rows, (index + 1) * rows)
        return dequantized(self.path, name, one, data)


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
