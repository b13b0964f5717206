"""Read sentencepiece's tokenizer.model, a protocol buffer, without the sentencepiece package.

Of ModelProto only three things matter here: `pieces` (field 1: piece = 1, score = 2, type = 3),
`trainer_spec.model_type` (field 2, field 3: 2 is BPE) and `normalizer_spec.add_dummy_prefix`
(field 3, field 3).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ...calib.safe_files import read_bytes
from ...kernels.errors import UserError

BPE = 2
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class SpmModel(NamedTuple):
    """Pieces in id order with their scores; types are GGUF's token types, which are the same."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    add_dummy_prefix: bool


def read_spm_model(path: Path) -> SpmModel:
    """UserError when `path` is damaged or holds another model than BPE."""
    pieces, scores, types = [], [], []
    model_type, add_dummy_prefix = 1, True
    try:
        for field, value in _fields(read_bytes(path)):
            if field == 1:
                piece: dict[int, Any] = dict(_fields(value))
                pieces.append(piece[1].decode("utf-8"))
                scores.append(struct.unpack("<f", piece.get(2, bytes(4)))[0])
                types.append(int(piece.get(3, 1)))
            elif field == 2:
                model_type = int(dict(_fields(value)).get(3, 1))
            elif field == 3:
                add_dummy_prefix = bool(dict(_fields(value)).get(3, True))
    except (IndexError, KeyError, ValueError, TypeError, AttributeError, struct.error) as e:
        raise UserError(f"{path} is damaged or no sentencepiece model ({e})") from e
    if model_type != BPE:
        raise UserError(f"{path} is no BPE model (type {model_type}), so llama.cpp's SPM differs")
    return SpmModel(pieces, scores, types, add_dummy_prefix)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a message: ints for varints, bytes for everything else."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == VARINT:
            value, at = _varint(data, at)
        else:
            if kind == BYTES:
                size, at = _varint(data, at)
            elif kind in (FIXED32, FIXED64):
                size = 4 if kind == FIXED32 else 8
            else:
                raise ValueError(f"wire type {kind}")
            value, at = data[at : at + size], at + size
            if len(value) < size:
                raise ValueError("truncated")
        yield tag >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The base-128 number at `at`, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
