"""safetensors files as byte ranges, so that shards are merged without holding a tensor in memory.

Format: u64 little-endian header length, JSON header {name: {dtype, shape, data_offsets}}, data.
The library writes a shard only from tensors that are all in memory; this copies bytes.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ...calib.shards import DTYPES, INDEX

COPY_BYTES = 1 << 22
MAX_SHARD_BYTES = 5 * 10**9


class RawTensor(NamedTuple):
    """Where a tensor's bytes lie: `dtype` and `shape` as the header has them."""

    name: str
    file: Path
    offset: int
    nbytes: int
    dtype: str
    shape: list[int]


def raw_tensors(file: Path) -> list[RawTensor]:
    """The tensors of a safetensors file that has been opened (and so checked) before."""
    with file.open("rb") as f:
        (length,) = struct.unpack("<Q", f.read(8))
        header: dict[str, Any] = json.loads(f.read(length))
    return [
        RawTensor(
            name, file, 8 + length + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0], entry["dtype"], entry["shape"],
        )
        for name, entry in header.items()
        if name != "__metadata__"
    ]  # fmt: skip


def write_shards(
    folder: Path, tensors: Iterable[RawTensor], max_shard_bytes: int = MAX_SHARD_BYTES
) -> int:
    """Write the tensors, in the order given, as model.safetensors or as shards with an index.

    Returns the number of bytes of tensor data. Files are fsynced.
    """
    shards: list[list[RawTensor]] = [[]]
    filled = 0
    for t in tensors:
        if shards[-1] and filled + t.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(t)
        filled += t.nbytes
    total = sum(t.nbytes for shard in shards for t in shard)
    if len(shards) == 1:
        _write_file(folder / "model.safetensors", shards[0])
        return total
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, shard)
        weight_map |= {t.name: name for t in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return total


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write and fsync tensors as one safetensors file.

    (The library's own writer reports a full disk as a damaged file.)
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    ordered = sorted(tensors.items(), key=lambda t: -t[1].element_size())
    with _synced(path) as out:
        out.write(_header((n, names[t.dtype], list(t.shape), t.nbytes) for n, t in ordered))
        for _, tensor in ordered:
            out.write(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def write_text(path: Path, text: str) -> None:
    """Write and fsync a text file."""
    with _synced(path) as f:
        f.write(text.encode("utf-8"))


def fsync_folder(folder: Path) -> None:
    """Make the folder's entries durable (a rename is, once its folder is synced)."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    """`path` opened for writing and fsynced when it is whole; an OSError names it."""
    try:
        with path.open("wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        e.filename = e.filename or str(path)
        raise


def _write_file(path: Path, tensors: list[RawTensor]) -> None:
    # widest elements first: every tensor is then aligned to its element size
    ordered = sorted(tensors, key=lambda t: -DTYPES[t.dtype].itemsize)
    with _synced(path) as out:
        out.write(_header((t.name, t.dtype, t.shape, t.nbytes) for t in ordered))
        for t in ordered:
            with t.file.open("rb") as source:
                source.seek(t.offset)
                _copy(source, out, t.nbytes)


def _header(tensors: Iterable[tuple[str, str, list[int], int]]) -> bytes:
    """Length and header of a file of tensors (name, dtype, shape, bytes) in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _copy(source: BinaryIO, out: BinaryIO, nbytes: int) -> None:
    while nbytes:
        data = source.read(min(nbytes, COPY_BYTES))
        assert data, "a shard shrank while it was copied"
        out.write(data)
        nbytes -= len(data)
