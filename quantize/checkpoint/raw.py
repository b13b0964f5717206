"""safetensors files as byte ranges, so that no file's tensors need to be in memory at once.

Format: u64 little-endian header length, JSON header {name: {dtype, shape, data_offsets}}, data.
The library writes a file only from tensors that are all in memory; here bytes are copied from file
to file (`write_shards`), or a file is laid out first and filled piece by piece (`OpenShard`).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ...calib.safetensors_file import DTYPES, HALF_BYTE, read_header
from ...calib.shards import INDEX
from ...kernels.errors import UserError
from ..sizes import MAX_SHARD_SIZE, parse_size
from .files import COPY_BYTES, FileRecord, synced, synced_and_hashed, write_text

MAX_SHARD_BYTES = parse_size(MAX_SHARD_SIZE, "MAX_SHARD_SIZE")
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Entry(Protocol):
    """A tensor as a header has it."""

    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> list[int]: ...


AnyEntry = TypeVar("AnyEntry", bound=Entry)


class Slot(NamedTuple):
    """The place of a tensor that is yet to be made: `dtype` and `shape` as the header has them."""

    name: str
    nbytes: int
    dtype: str
    shape: list[int]


class RawTensor(NamedTuple):
    """Where a tensor's bytes lie: `dtype` and `shape` as the header has them."""

    name: str
    file: Path
    offset: int
    nbytes: int
    dtype: str
    shape: list[int]


class MadeTensor(NamedTuple):
    """A tensor that `make` hands out when its turn comes to be written."""

    name: str
    nbytes: int
    dtype: str
    shape: list[int]
    make: Callable[[], Tensor]


class Written(NamedTuple):
    """What `write_shards` wrote. files: name -> record, the index among them."""

    tensor_bytes: int
    files: dict[str, FileRecord]


def raw_tensors(file: Path) -> list[RawTensor]:
    """The tensors of a safetensors file; DamagedFile where it breaks its format."""
    return [
        RawTensor(name, file, t.start, t.nbytes, t.dtype, list(t.shape))
        for name, t in read_header(file).tensors.items()
    ]


def slot(name: str, tensor: Tensor) -> Slot:
    """Where `tensor` (it may be on meta) will go."""
    shape = list(tensor.shape)
    if tensor.dtype is HALF_BYTE:
        shape[-1] *= 2
    return Slot(name, tensor.nbytes, NAMES[tensor.dtype], shape)


def split_shards(
    tensors: Iterable[AnyEntry], max_shard_bytes: int = MAX_SHARD_BYTES
) -> dict[str, list[AnyEntry]]:
    """File name -> its tensors, in the order given: model.safetensors, or numbered shards."""
    shards: list[list[AnyEntry]] = [[]]
    filled = 0
    for t in tensors:
        if shards[-1] and filled + t.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(t)
        filled += t.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": s for i, s in enumerate(shards, 1)}


def write_index(folder: Path, shards: Mapping[str, Sequence[Entry]]) -> dict[str, FileRecord]:
    """Write the index of several shards (one needs none); returns the record of its file."""
    if len(shards) == 1:
        return {}
    total = sum(t.nbytes for tensors in shards.values() for t in tensors)
    weight_map = {t.name: file for file, tensors in shards.items() for t in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return {INDEX: write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")}


def write_shards(
    folder: Path,
    tensors: Iterable[RawTensor | MadeTensor],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Written:
    """Write the tensors, in the order given, as model.safetensors or as shards with an index.

    One that is made is in memory while it is written, of others a few megabytes are. Files are
    fsynced.
    """
    shards = split_shards(tensors, max_shard_bytes)
    files = {}
    for file, held in shards.items():
        ordered = in_file_order(held)
        with synced_and_hashed(folder / file) as out:
            out.write(_header(ordered))
            for t in ordered:
                for data in _data(t):
                    out.write(data)
        files[file] = out.record
    total = sum(t.nbytes for held in shards.values() for t in held)
    return Written(total, files | write_index(folder, shards))


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> FileRecord:
    """Write and fsync tensors as one safetensors file; returns its record.

    (The library's own writer reports a full disk as a damaged file.)
    """
    ordered = in_file_order([slot(name, t) for name, t in tensors.items()])
    with synced_and_hashed(path) as out:
        out.write(_header(ordered))
        for t in ordered:
            out.write(tensor_bytes(tensors[t.name]))
    return out.record


def read_raw(t: RawTensor) -> Iterator[bytes]:
    """The tensor's bytes, a few megabytes at a time; UserError when the file is not there or has
    become shorter."""
    left = t.nbytes
    try:
        source = t.file.open("rb")
    except FileNotFoundError as e:
        raise UserError(f"{t.file} is gone; put it back and give the same command again") from e
    with source:
        source.seek(t.offset)
        while left:
            data = source.read(min(left, COPY_BYTES))
            if not data:
                raise UserError(
                    f"{t.file} became shorter while '{t.name}' was read from it; put the whole "
                    "file back and give the same command again"
                )
            yield data
            left -= len(data)


def _data(t: RawTensor | MadeTensor) -> Iterator[bytes]:
    if isinstance(t, RawTensor):
        yield from read_raw(t)
    else:
        data = tensor_bytes(t.make())
        assert len(data) == t.nbytes, (t.name, len(data), t.nbytes)
        yield data


def tensor_bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


class OpenShard:
    """A safetensors file whose tensors are filled in any order, each from its start to its end.

    A file that was begun before with the same tensors keeps what it holds; `append` then goes on
    with tensors from their start. Bytes are on disk when `sync` returns.
    """

    def __init__(self, path: Path, tensors: Sequence[Entry]) -> None:
        """What is there has to be of the same tensors, see `is_begun`."""
        ordered = in_file_order(tensors)
        header = _header(ordered)
        self._path = path
        self._next: dict[str, int] = {}
        self._end: dict[str, int] = {}
        offset = len(header)
        for t in ordered:
            self._next[t.name], offset = offset, offset + t.nbytes
            self._end[t.name] = offset
        if path.exists():
            self._file = path.open("r+b")
        else:
            with synced(path.with_name(path.name + ".tmp")) as begun:
                begun.write(header)
                begun.truncate(offset)
            os.replace(path.with_name(path.name + ".tmp"), path)
            self._file = path.open("r+b")

    def append(self, name: str, data: bytes) -> None:
        """Write the next bytes of the tensor `name`."""
        start = self._next[name]
        assert start + len(data) <= self._end[name], (name, start, len(data), self._end[name])
        try:
            self._file.seek(start)
            self._file.write(data)
        except OSError as e:
            e.filename = e.filename or str(self._path)
            raise
        self._next[name] = start + len(data)

    def filled(self, name: str) -> bool:
        return self._next[name] == self._end[name]

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def is_begun(path: Path, tensors: Sequence[Entry]) -> bool:
    """Whether a shard of these tensors has been begun under that name, and is none the shorter."""
    header = _header(in_file_order(tensors))
    if not path.is_file() or path.stat().st_size != len(header) + sum(t.nbytes for t in tensors):
        return False
    with path.open("rb") as f:
        return f.read(len(header)) == header


def in_file_order(tensors: Iterable[AnyEntry]) -> list[AnyEntry]:
    """Widest elements first: every tensor is then aligned to its element size."""
    return sorted(tensors, key=lambda t: -DTYPES[t.dtype].itemsize)


def _header(tensors: Iterable[Entry]) -> bytes:
    """Length and header of a file of tensors in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for t in tensors:
        offsets = [end, end + t.nbytes]
        header[t.name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": offsets}
        end += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
