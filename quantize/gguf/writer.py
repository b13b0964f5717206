"""Write the GGUF container: metadata from a plain dict, then tensors one at a time.

Written in a folder beside the target, synced to disk, then renamed: a file under its final name is
whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from ...kernels.errors import UserError
from ..checkpoint.workspace import workspace
from .codecs import Codec


class Planned(NamedTuple):
    """A tensor that a file will hold. `shape` has rows first, as in torch."""

    name: str
    shape: tuple[int, ...]
    codec: type[Codec]

    @property
    def weights(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * self.codec.row_bytes(self.shape[-1])


def start_file(
    path: Path, architecture: str, keys: dict[str, Any], plan: list[Planned]
) -> gguf.GGUFWriter:
    """A writer that has written header, metadata and tensor table to `path`; data comes next."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        add_key(writer, key, value)
    for tensor in plan:
        byte_shape = (*tensor.shape[:-1], tensor.codec.row_bytes(tensor.shape[-1]))
        kind = gguf.GGMLQuantizationType[tensor.codec.name]
        writer.add_tensor_info(
            tensor.name, byte_shape, np.dtype(np.uint8), tensor.nbytes, raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return writer


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """One metadata entry: bool, int (uint32), float (float32), str, or a list of one of them."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, list), (key, type(value))
        writer.add_array(key, value)


@contextmanager
def replacing(path: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary path on the disk of `path`, synced and renamed to it on success, removed
    otherwise.

    UserError when `path` exists and `overwrite` is not given, or another process is writing it.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the name of a file, such as model.gguf")
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists; give another name or --overwrite")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with workspace(path) as folder:
            temporary = folder / path.name
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror or e}") from e


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
