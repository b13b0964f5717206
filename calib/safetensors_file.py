"""The header of a safetensors file, checked before anything in it is believed.

Format: u64 little-endian length of the header, the header as JSON {name: {dtype, shape,
data_offsets}} with an optional `__metadata__` of strings, then the data. The tensors' bytes follow
each other without gap or overlap, in any order of names, from the header's end to the file's.
Everything in lowbit that opens such a file reads its header here.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .safe_files import INDEX, DamagedFile, JsonLimits, checked_path, parse_json

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip
HALF_BYTE = torch.float4_e2m1fn_x2  # a header counts its numbers, a tensor's shape pairs of them
LENGTH_BYTES = 8
LIMITS = JsonLimits(100_000_000, INDEX.values, depth=4)  # the format's own limit in bytes
MOST_DIMENSIONS = 64
LARGEST_DIMENSION = 1 << 48
LONGEST_NAME = 1024
METADATA = "__metadata__"
PICKLES = {b"PK\x03\x04": "a zip archive, as torch.save writes", b"\x80": "a pickle"}


class StoredTensor(NamedTuple):
    """A tensor of a file, dtype and shape as the header has them. start: its first byte's place in
    the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """As torch counts: two numbers of half a byte are one."""
        if self.torch_dtype is HALF_BYTE:
            return *self.shape[:-1], self.shape[-1] // 2
        return self.shape


class Header(NamedTuple):
    """Tensors by name, in the header's order, and the file's own metadata."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """The header of the file `path` in a model folder.

    DamagedFile for the first rule of the format that the file breaks, for what is no such file, and
    for a dtype that lowbit does not know. Memory is bounded by LIMITS, whatever the header claims.
    """
    checked_path(path.parent, path.name)
    size = path.stat().st_size
    with path.open("rb") as f:
        start = f.read(LENGTH_BYTES)
        if len(start) < LENGTH_BYTES:
            raise DamagedFile(path, "truncated", f"{size} bytes", "at least 8")
        (length,) = struct.unpack("<Q", start)
        if length > size - LENGTH_BYTES or length > LIMITS.nbytes:
            raise _not_a_header(path, start, length, size)
        text = f.read(length)
    if not text.startswith(b"{"):
        raise DamagedFile(path, "header", f"a header that begins {text[:8]!r}", "a JSON object")
    header = parse_json(text, path, LIMITS)
    metadata = _metadata(path, header.pop(METADATA, {}))
    data_start = LENGTH_BYTES + length
    tensors = {name: _entry(path, name, entry, data_start) for name, entry in header.items()}
    _check_layout(path, tensors, data_start, size)
    return Header(tensors, metadata)


def _not_a_header(path: Path, start: bytes, length: int, size: int) -> DamagedFile:
    for magic, kind in PICKLES.items():
        if start.startswith(magic):
            return DamagedFile(
                path, "pickle", kind, "a safetensors header", what="is not a safetensors file",
                remedy="loading a pickle runs the code in it: do not use this file",
            )  # fmt: skip
    most = min(size - LENGTH_BYTES, LIMITS.nbytes)
    return DamagedFile(path, "header length", f"a header of {length:,} bytes", f"at most {most:,}")


def _metadata(path: Path, metadata: Any) -> dict[str, str]:
    texts = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not texts:
        raise DamagedFile(path, "header", f"a {METADATA} of other values", "one of strings")
    return metadata


def _entry(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    """A tensor's entry with its own numbers checked against each other."""
    if not name or not name.isprintable() or len(name) > LONGEST_NAME:
        shown = name[:40]
        expected = f"1 to {LONGEST_NAME} printable characters"
        raise DamagedFile(path, "tensor name", f"a tensor named {shown!r}", expected)
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        keys = list(entry)[:4] if isinstance(entry, dict) else type(entry).__name__
        raise DamagedFile(path, "header", f"{keys}", "dtype, shape and data_offsets", name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DamagedFile(
            path, "dtype", f"dtype {str(dtype)[:40]!r}", f"one of {', '.join(DTYPES)}", name,
            what="cannot be read",
        )  # fmt: skip
    if not _is_shape(shape):
        expected = f"up to {MOST_DIMENSIONS} sizes of 0 to {LARGEST_DIMENSION:,}"
        raise DamagedFile(path, "shape", f"shape {str(shape)[:80]}", expected, name)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise DamagedFile(path, "offsets", f"offsets {str(offsets)[:80]}", "two numbers", name)
    numbers = 1
    for d in shape:
        numbers *= d
    begin, end = offsets
    nbits = numbers * (4 if DTYPES[dtype] is HALF_BYTE else 8 * DTYPES[dtype].itemsize)
    if nbits != 8 * (end - begin):
        found = f"shape {shape} of {dtype} in {end - begin:,} bytes"
        raise DamagedFile(path, "size", found, f"{nbits / 8:,.0f} bytes", name)
    if DTYPES[dtype] is HALF_BYTE and (not shape or shape[-1] % 2):
        raise DamagedFile(path, "shape", f"shape {shape} of {dtype}", "an even last size", name)
    return StoredTensor(dtype, tuple(shape), data_start + begin, end - begin)


def _check_layout(path: Path, tensors: dict[str, StoredTensor], data_start: int, size: int) -> None:
    """DamagedFile unless the tensors fill the file from the header's end, one after the other."""
    at = data_start
    for name, t in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if t.start != at:
            kind = "overlap" if t.start < at else "gap"
            found = f"offset {t.start - data_start:,}"
            raise DamagedFile(path, kind, found, f"{at - data_start:,}, the end before it", name)
        at += t.nbytes
    if at != size:
        fault = "truncated" if at > size else "gap"
        found = f"{size - data_start:,} bytes of data"
        raise DamagedFile(path, fault, found, f"the {at - data_start:,} of its tensors")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_shape(shape: Any) -> bool:
    """Sizes of which even the non-zero ones multiply to a number that 64 bits hold."""
    if (
        not isinstance(shape, list)
        or len(shape) > MOST_DIMENSIONS
        or not all(map(_is_count, shape))
    ):
        return False
    numbers = 1
    for d in shape:
        numbers *= max(d, 1)
    return all(d <= LARGEST_DIMENSION for d in shape) and numbers < 1 << 60
