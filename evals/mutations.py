"""Damage to a file's bytes, drawn choice by choice, so that any source of choices can steer it.

`choose(n)` gives a whole number below n: hypothesis draws it and shrinks it, a fuzzer that watches
coverage takes it from its own bytes. Half of the damage knows JSON, where the file is JSON or has a
JSON header: it puts odd values in the place of right ones, so that what is tested is behind the
parser as well.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from typing import Any

Choose = Callable[[int], int]

MOST_EDITS = 4
MOST_BYTES = 64  # moved, doubled or taken away at once
NUMBERS = (0, 1, 7, 255, 256, 65535, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 64) - 1)
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 1 << 31, 1 << 62, -(1 << 62), 0.5, 1e308, float("nan"),
    float("inf"), "", "x", "../x", "/etc/passwd", "a\x00b", "\x1b[2J", "\ud800", "x" * 3000,
    "re:(a+)+$", "re:[", [], {}, [[]], [{}], {"": {}}, [1, 2, 3], [None], {"a": None},
)  # fmt: skip


def mutate_bytes(data: bytes, choose: Choose) -> bytes:
    """`data` with one to MOST_EDITS edits: bits turned, numbers written over, pieces cut, doubled,
    put elsewhere, an end taken away."""
    out = bytearray(data)
    for _ in range(1 + choose(MOST_EDITS)):
        if not out:
            break
        at = _place(len(out), choose)
        size = 1 + choose(min(MOST_BYTES, len(out) - at))
        kind = choose(8)
        if kind == 0:
            out[at] ^= 1 << choose(8)
        elif kind == 1:
            out[at] = choose(256)
        elif kind in (2, 3):
            number = struct.pack("<Q", NUMBERS[choose(len(NUMBERS))])[: 8 if kind == 2 else 4]
            out[at : at + len(number)] = number
        elif kind == 4:
            del out[at : at + size]
        elif kind == 5:
            out[at:at] = out[at : at + size]
        elif kind == 6:
            to = _place(len(out), choose)
            out[to : to + size] = out[at : at + size]
        else:
            del out[len(out) - choose(len(out)) :]
    return bytes(out)


def mutate_json(data: bytes, choose: Choose) -> bytes:
    """The JSON text `data` with one to MOST_EDITS values replaced, taken away, or given twice."""
    value = json.loads(data)
    for _ in range(1 + choose(MOST_EDITS)):
        places = list(_places(value))
        if not places:
            break
        container, key = places[choose(len(places))]
        kind = choose(4)
        if kind == 0:
            del container[key]
        elif kind == 1:
            other, its_key = places[choose(len(places))]
            container[key] = json.loads(json.dumps(other[its_key]))
        else:
            container[key] = copy.deepcopy(ODD_VALUES[choose(len(ODD_VALUES))])
    return json.dumps(value).encode()


def mutate_header(data: bytes, choose: Choose) -> bytes:
    """A safetensors file with its JSON header changed and its length made to fit."""
    (length,) = struct.unpack("<Q", data[:8])
    header = mutate_json(data[8 : 8 + length], choose)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def _place(size: int, choose: Choose) -> int:
    """A place in a file, as often in its first kilobyte as anywhere."""
    return choose(min(size, 1024)) if choose(2) else choose(size)


def _places(value: Any) -> Any:
    """Every (container, key) below `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items) if isinstance(value, dict | list) else ():
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)
