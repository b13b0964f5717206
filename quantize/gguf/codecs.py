"""GGUF block types: float32 rows to bytes and back, every byte as llama.cpp's reference has it.

A row is cut into blocks of consecutive columns. A block stores its scale `d` (and, for the `_1`
types, its minimum `m`) as float16, then the codes: weight j and weight j + 16 share a byte, the
fifth bits of the 5-bit types lie apart in 4 bytes. `pack` writes given scales and codes, so that a
quantized checkpoint is repacked without a second rounding; `encode` first chooses them by the
reference's rule. All blocks of a slice of rows are done at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

SLICE = 1 << 20  # weights encoded at once: keeps the temporaries in cache


class Codec(ABC):
    """One block type. `block`: weights in a block; `nbytes`: bytes in a block."""

    name: ClassVar[str]
    block: ClassVar[int]
    nbytes: ClassVar[int]

    @classmethod
    def row_bytes(cls, columns: int) -> int:
        """Bytes of a row of `columns` weights; `columns` is a multiple of the block."""
        assert columns % cls.block == 0, (cls.name, columns)
        return columns // cls.block * cls.nbytes

    @classmethod
    def encode(cls, x: Tensor) -> Tensor:
        """float32 [rows, columns] to uint8 [rows, row_bytes(columns)]."""
        assert x.dtype == torch.float32, x.dtype
        out = torch.empty(x.shape[0], cls.row_bytes(x.shape[1]), dtype=torch.uint8)
        step = max(1, SLICE // x.shape[1])
        for i in range(0, x.shape[0], step):
            blocks = x[i : i + step].reshape(-1, cls.block)
            out[i : i + step] = cls.encode_blocks(blocks).view(-1, out.shape[1])
        return out

    @classmethod
    def decode(cls, data: Tensor) -> Tensor:
        """uint8 [rows, bytes] to float32 [rows, bytes // nbytes * block]."""
        assert data.dtype == torch.uint8 and data.shape[1] % cls.nbytes == 0, data.shape
        out = torch.empty(data.shape[0], data.shape[1] // cls.nbytes * cls.block)
        step = max(1, SLICE // out.shape[1])
        for i in range(0, data.shape[0], step):
            blocks = data[i : i + step].reshape(-1, cls.nbytes)
            out[i : i + step] = cls.decode_blocks(blocks).view(-1, out.shape[1])
        return out

    @classmethod
    @abstractmethod
    def encode_blocks(cls, x: Tensor) -> Tensor:
        """float32 [n, block] to uint8 [n, nbytes]."""

    @classmethod
    @abstractmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        """uint8 [n, nbytes] to float32 [n, block]."""


class F32(Codec):
    name, block, nbytes = "F32", 1, 4

    @classmethod
    def encode_blocks(cls, x: Tensor) -> Tensor:
        return x.contiguous().view(torch.uint8)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        return data.contiguous().view(torch.float32)


class F16(Codec):
    name, block, nbytes = "F16", 1, 2

    @classmethod
    def encode_blocks(cls, x: Tensor) -> Tensor:
        return to_half_bytes(x)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        return from_half_bytes(data)


class BF16(Codec):
    name, block, nbytes = "BF16", 1, 2

    @classmethod
    def encode_blocks(cls, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).view(torch.uint8)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        return data.contiguous().view(torch.bfloat16).float()


class SymmetricCodec(Codec):
    """value = d * level with integer levels in [low, high]."""

    block = 32
    low: ClassVar[int]
    high: ClassVar[int]

    @classmethod
    @abstractmethod
    def pack(cls, d: Tensor, levels: Tensor) -> Tensor:
        """Scale [n, 1] (rounded to float16) and int8 levels [n, 32] to uint8 [n, nbytes]."""


class Q8_0(SymmetricCodec):
    """d f16; 32 int8. d = largest magnitude / 127, rounding half away from zero."""

    name, nbytes, low, high = "Q8_0", 34, -128, 127

    @classmethod
    def encode_blocks(cls, x: Tensor) -> Tensor:
        d = x.abs().amax(-1, keepdim=True) / 127
        scaled = x * reciprocal(d)
        size = scaled.abs()
        whole = size.floor()
        rounded = whole + (2 * (size - whole)).floor()
        return cls.pack(d, finite(scaled.sign() * rounded).to(torch.int8))

    @classmethod
    def pack(cls, d: Tensor, levels: Tensor) -> Tensor:
        return torch.cat([to_half_bytes(d), levels.view(torch.uint8)], -1)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        levels = data[:, 2:].view(torch.int8)
        return from_half_bytes(data[:, :2]) * levels


class SmallSymmetricCodec(SymmetricCodec):
    """d f16; the fifth bits, where there are any; 16 bytes of nibbles, level - low. The weight of
    largest magnitude becomes the level `low`."""

    @classmethod
    def encode_blocks(cls, x: Tensor) -> Tensor:
        d = extreme(x) / cls.low
        shifted = to_codes(x * reciprocal(d) + (0.5 - cls.low), cls.high - cls.low)
        return cls.pack(d, shifted.add_(cls.low))

    @classmethod
    def pack(cls, d: Tensor, levels: Tensor) -> Tensor:
        q = levels - cls.low
        return torch.cat([to_half_bytes(d), *code_bytes(q, cls.high - cls.low)], -1)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        return from_half_bytes(data[:, :2]) * (codes_of(data[:, 2:]) + cls.low)


class Q4_0(SmallSymmetricCodec):
    name, nbytes, low, high = "Q4_0", 18, -8, 7


class Q5_0(SmallSymmetricCodec):
    name, nbytes, low, high = "Q5_0", 22, -16, 15


class AffineCodec(Codec):
    """value = d * q + m with codes q in [0, high]: d, m f16; fifth bits; 16 bytes of nibbles."""

    block = 32
    high: ClassVar[int]

    @classmethod
    def encode_blocks(cls, x: Tensor) -> Tensor:
        m = x.amin(-1, keepdim=True)
        d = (x.amax(-1, keepdim=True) - m) / cls.high
        return cls.pack(d, m, to_codes((x - m) * reciprocal(d) + 0.5, cls.high))

    @classmethod
    def pack(cls, d: Tensor, m: Tensor, q: Tensor) -> Tensor:
        """Scale and minimum [n, 1] (rounded to float16), codes [n, 32] to uint8 [n, nbytes]."""
        return torch.cat([to_half_bytes(d), to_half_bytes(m), *code_bytes(q, cls.high)], -1)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        d, m = from_half_bytes(data[:, :2]), from_half_bytes(data[:, 2:4])
        return d * codes_of(data[:, 4:]) + m


class Q4_1(AffineCodec):
    name, nbytes, high = "Q4_1", 20, 15


class Q5_1(AffineCodec):
    name, nbytes, high = "Q5_1", 24, 31


def extreme(x: Tensor) -> Tensor:
    """The first entry of largest magnitude of each block, with its sign: [n, 1]."""
    return x.gather(-1, x.abs().argmax(-1, keepdim=True))


def reciprocal(d: Tensor) -> Tensor:
    """1 / d, and 0 where d is 0."""
    return torch.where(d == 0, 0.0, 1 / d)


def to_codes(q: Tensor, high: int) -> Tensor:
    """q >= 0 truncated and capped at `high`, as int8."""
    return finite(q).trunc_().clamp_(0, high).to(torch.int8)


def finite(q: Tensor) -> Tensor:
    """NaN and infinities to 0: codes of blocks so small that 1 / d overflows and d is 0 as f16."""
    return q.nan_to_num(0.0, 0.0, 0.0)


def to_half_bytes(x: Tensor) -> Tensor:
    """float32 [n, k] to the bytes of its float16 rounding, uint8 [n, 2 * k]."""
    return x.to(torch.float16).view(torch.uint8)


def from_half_bytes(data: Tensor) -> Tensor:
    """uint8 [n, 2 * k] read as float16, as float32 [n, k]."""
    return data.contiguous().view(torch.float16).float()


def code_bytes(q: Tensor, high: int) -> list[Tensor]:
    """Codes [n, 32] from 0 to `high`, 15 or 31, as columns of bytes: fifth bits, then nibbles."""
    return [to_nibbles(q)] if high == 15 else [to_fifth_bits(q), to_nibbles(q)]


def codes_of(data: Tensor) -> Tensor:
    """uint8 [n, 16] (nibbles) or [n, 20] (fifth bits before them) to int8 codes [n, 32]."""
    nibbles = from_nibbles(data[:, -16:])
    return nibbles if data.shape[1] == 16 else nibbles + from_fifth_bits(data[:, :4])


def to_nibbles(q: Tensor) -> Tensor:
    """Low four bits of codes [n, 32] to uint8 [n, 16]: byte j holds codes j (low) and j + 16."""
    low = q.view(torch.uint8) & 0x0F
    return low[:, :16] | (low[:, 16:] << 4)


def from_nibbles(data: Tensor) -> Tensor:
    """uint8 [n, 16] to int8 codes [n, 32]."""
    return torch.cat([data & 0x0F, data >> 4], -1).view(torch.int8)


def to_fifth_bits(q: Tensor) -> Tensor:
    """Bit 4 of codes [n, 32] to uint8 [n, 4]: code j is bit j % 8 of byte j // 8."""
    bits = (q.view(torch.uint8) >> 4 & 1).view(-1, 4, 8)
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def from_fifth_bits(data: Tensor) -> Tensor:
    """uint8 [n, 4] to int8 [n, 32], each 16 or 0."""
    bits = data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return (bits << 4).flatten(1).view(torch.int8)
