"""Write the GGUF container: metadata from a plain dict, then tensors one at a time.

Written in a folder beside the target, synced to disk, then renamed: a file under its final name is
whole. A model may be cut into parts of a largest size, NAME-00001-of-0000N.gguf: the first holds
the metadata, each says which one it is, and the first gets its name last.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from ...kernels.errors import UserError
from ..checkpoint.files import explained, fsync_path
from ..checkpoint.workspace import workspace
from .blocks import Codec
from .container import LONGEST_NAME
from .reader import MOST_PARTS, PART


class UInt16(int):
    """An entry that is stored as uint16."""


class Int32(int):
    """An entry that is stored as int32."""


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


class PartedWriter:
    """Writes the planned tensors in order, each with `write`, from one part into the next."""

    def __init__(
        self,
        folder: Path,
        names: list[str],
        architecture: str,
        keys: dict[str, Any],
        parts: list[list[Planned]],
    ) -> None:
        self._folder, self._names, self._architecture = folder, names, architecture
        self._keys, self._parts = keys, parts
        self._left: list[Planned] = []
        self._part = -1
        self._writer: gguf.GGUFWriter | None = None
        self._next_part()

    def write(self, data: np.ndarray[Any, Any]) -> None:
        """The bytes of the next tensor."""
        if not self._left:
            self._next_part()
        tensor = self._left.pop(0)
        assert self._writer is not None and data.nbytes == tensor.nbytes, (tensor, data.nbytes)
        self._writer.write_tensor_data(data)

    def close(self) -> None:
        """Close the part that is open; all are written when as many tensors came as planned."""
        if self._writer is not None:
            self._writer.close()

    def _next_part(self) -> None:
        self.close()
        self._part += 1
        self._left = list(self._parts[self._part])
        keys = {} if self._part else dict(self._keys)
        if len(self._parts) > 1:
            keys |= {
                "split.no": UInt16(self._part),
                "split.count": UInt16(len(self._parts)),
                "split.tensors.count": Int32(sum(len(part) for part in self._parts)),
            }
        path = self._folder / self._names[self._part]
        self._writer = start_file(path, self._architecture, keys, self._left)


@contextmanager
def writing(
    out: Path,
    architecture: str,
    keys: dict[str, Any],
    planned: list[Planned],
    overwrite: bool = False,
    max_size: int | None = None,
) -> Iterator[PartedWriter]:
    """A writer of the file `out`, or of its parts where it holds more than `max_size` bytes of
    tensors; they have their names when the context is left without an error.

    UserError when a file exists and `overwrite` is not given, a tensor's name is too long, or
    nothing can be written there.
    """
    for tensor in planned:
        if len(tensor.name.encode()) > LONGEST_NAME:
            raise UserError(
                f"the tensor name '{tensor.name}' has {len(tensor.name.encode())} bytes; "
                f"llama.cpp has room for {LONGEST_NAME}"
            )
    parts = cut(planned, max_size)
    names = [path.name for path in part_paths(out, len(parts))]
    with replacing(out, names, overwrite) as folder:
        writer = PartedWriter(folder, names, architecture, keys, parts)
        try:
            yield writer
        finally:
            writer.close()


def cut(planned: list[Planned], max_size: int | None) -> list[list[Planned]]:
    """The tensors of each part: as many as fit, one at least."""
    parts: list[list[Planned]] = [[]]
    size = 0
    for tensor in planned:
        if parts[-1] and max_size is not None and size + tensor.nbytes > max_size:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.nbytes
    if len(parts) > MOST_PARTS:
        raise UserError(f"{len(parts)} parts are more than {MOST_PARTS}; choose a larger size")
    return parts


def part_paths(out: Path, count: int) -> list[Path]:
    """The files of `out` in `count` parts."""
    if count == 1:
        return [out]
    stem = out.name.removesuffix(".gguf")
    return [out.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]


def earlier_output(out: Path) -> set[Path]:
    """The files that `out` was written to before, in one or in any number of parts."""
    stem = out.name.removesuffix(".gguf")
    found = {out} if out.exists() else set()
    if out.parent.is_dir():
        parts = ((path, PART.fullmatch(path.name)) for path in out.parent.iterdir())
        found |= {path for path, part in parts if part is not None and part[1] == stem}
    return found


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
    """One metadata entry: bool, int (uint32), float (float32), str, a list of one of them, or one
    of the integers of another width above."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, UInt16):
        writer.add_uint16(key, value)
    elif isinstance(value, Int32):
        writer.add_int32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, list), (key, type(value))
        writer.add_array(key, value)


def to_replace(out: Path, overwrite: bool, paths: Sequence[Path] = ()) -> list[Path]:
    """The files that stand where `out` is to be written, in whatever number of parts or as `paths`.

    UserError when there are any and `overwrite` is not given, or one is a folder.
    """
    earlier = sorted(earlier_output(out).union(p for p in paths if p.exists()))
    for path in (out, *paths, *earlier):
        if path.is_dir():
            raise UserError(f"{path} is a folder; give the name of a file, such as model.gguf")
    if earlier and not overwrite:
        raise UserError(f"{earlier[0]} exists; give another name or --overwrite")
    return earlier


@contextmanager
def replacing(out: Path, names: list[str], overwrite: bool) -> Iterator[Path]:
    """A folder on the disk of `out` for the files `names`, which are synced and moved beside `out`
    on success, the first one last, and thrown away otherwise. What `out` was before, in whatever
    number of parts, is then gone.

    UserError when that exists and `overwrite` is not given, or another process is writing `out`.
    """
    paths = [out.with_name(name) for name in names]
    earlier = to_replace(out, overwrite, paths)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with workspace(out) as folder:
            yield folder
            for path in paths:
                fsync_path(folder / path.name)
            for path in earlier:  # a first part would stand before parts not its own
                if path != paths[0] or len(paths) > 1:
                    path.unlink()
            fsync_path(out.parent)
            for path in reversed(paths):
                os.replace(folder / path.name, path)
            fsync_path(out.parent)
    except OSError as e:
        raise UserError(f"cannot write {out}: {explained(e) or e}") from e
