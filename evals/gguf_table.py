"""A GGUF file as a value that can be edited and written back, with the types of its keys.

lowbit's reader (quantize/gguf/container.py) forgets types and refuses what is wrong; the fuzzer
wants files that are wrong behind a whole container. What is read here is taken to be whole; what is
written need not be: types, names and numbers go out as they are, tensors one after the other.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import Any

import gguf

from ..quantize.gguf.container import ARRAY, SCALARS, STRING

MOST_DATA = 1 << 20  # bytes of a tensor's data that are made up


@dataclass
class Key:
    """kind: the number of the value's type. Of an array, value is (type of its items, items)."""

    name: bytes
    kind: int
    value: Any


@dataclass
class Row:
    """A line of the tensor table and the tensor's bytes. dims: the innermost first."""

    name: bytes
    dims: list[int]
    kind: int
    data: bytes


@dataclass
class Table:
    version: int
    keys: list[Key]
    rows: list[Row]


def read_table(data: bytes) -> Table:
    """The table of a whole GGUF file, with its tensors' bytes."""
    cursor = _Cursor(data)
    cursor.take(4)
    version, rows, keys = cursor.number("I"), cursor.number("Q"), cursor.number("Q")
    table = Table(version, [cursor.key() for _ in range(keys)], [])
    listed = [cursor.row() for _ in range(rows)]
    start = _padded(cursor.at, _alignment(table))
    for row, offset in listed:
        at = start + offset
        table.rows.append(Row(row.name, row.dims, row.kind, data[at : at + _size(row)]))
    return table


def write_table(table: Table) -> bytes:
    """The file's bytes. A tensor whose shape and type want more or fewer bytes than it has gets
    zeros or loses its end, up to MOST_DATA bytes."""
    alignment = _alignment(table)
    head = b"GGUF" + struct.pack("<IQQ", table.version, len(table.rows), len(table.keys))
    head += b"".join(_text(k.name) + _typed(k.kind, k.value) for k in table.keys)
    body = bytearray()
    for row in table.rows:
        head += _text(row.name) + struct.pack("<I", len(row.dims))
        head += struct.pack(f"<{len(row.dims)}QIQ", *row.dims, row.kind, len(body))
        size = min(_size(row), MOST_DATA)
        body += row.data[:size].ljust(_padded(size, alignment), b"\0")
    return head.ljust(_padded(len(head), alignment), b"\0") + bytes(body)


def _alignment(table: Table) -> int:
    """general.alignment, or 32 where it is no power of two that a small file has."""
    said = next((k.value for k in table.keys if k.name == b"general.alignment"), 32)
    right = type(said) is int and said in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    return said if right else 32


def _size(row: Row) -> int:
    """The bytes that a tensor's shape and type mean; those that it has where they mean nothing."""
    try:
        block, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(row.kind)]
    except ValueError:
        return len(row.data)
    return prod(row.dims) // block * nbytes


def _padded(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _typed(kind: int, value: Any) -> bytes:
    return struct.pack("<I", kind) + _plain(kind, value)


def _plain(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind != ARRAY:
        return struct.pack("<" + SCALARS[kind], value)
    inner, items = value
    if inner in SCALARS:
        packed = struct.pack(f"<{len(items)}{SCALARS[inner]}", *items)
    else:
        packed = b"".join(_plain(inner, item) for item in items)
    return struct.pack("<IQ", inner, len(items)) + packed


class _Cursor:
    """A position in a whole file that moves over what it reads."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> bytes:
        return self.take(self.number("Q"))

    def key(self) -> Key:
        name, kind = self.text(), self.number("I")
        return Key(name, kind, self.value(kind))

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.number(SCALARS[kind])
        inner, count = self.number("I"), self.number("Q")
        if inner == STRING:
            return inner, [self.text() for _ in range(count)]
        code = f"<{count}{SCALARS[inner]}"
        return inner, list(struct.unpack(code, self.take(struct.calcsize(code))))

    def row(self) -> tuple[Row, int]:
        """A line of the tensor table, and its offset."""
        name, dims = self.text(), self.number("I")
        sizes = [self.number("Q") for _ in range(dims)]
        return Row(name, sizes, self.number("I"), b""), self.number("Q")
