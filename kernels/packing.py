"""Pack and unpack twins: signed codes to the words that checkpoints store, and back.

The compressed-tensors bitstream: code i of a row occupies bits [i*b, (i+1)*b) of a dense
little-endian stream, cut into int32 words; the stored value is code + 2^(b-1). A row of n codes
takes ceil(n*b/32) words, the unused top bits are zero. 32 codes fill exactly b words and 8 codes b
bytes, so rows are padded to chunks of 32 and handled by eights, as bytes (of a little-endian
machine, as everywhere that torch runs). Elements of 4-bit floats are packed two to a byte.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 32


def packed_words(columns: int, num_bits: int) -> int:
    """Number of int32 words that hold `columns` codes of `num_bits`."""
    return -(-columns * num_bits // 32)


def pack_bits(codes: Tensor, num_bits: int) -> Tensor:
    """Signed int8 codes [rows, n] to int32 words [rows, ceil(n*b/32)]; 1 <= num_bits <= 8."""
    _check_bits(num_bits)
    rows, n = codes.shape
    unsigned = torch.zeros(rows, -(-n // CHUNK) * CHUNK, dtype=torch.uint8, device=codes.device)
    torch.add(codes.view(torch.uint8), 1 << (num_bits - 1), out=unsigned[:, :n])
    eights = unsigned.view(rows, -1, 8)
    packed = torch.zeros(*eights.shape[:2], num_bits, dtype=torch.uint8, device=codes.device)
    for i in range(8):
        byte, offset = divmod(i * num_bits, 8)
        packed[..., byte] |= eights[..., i] << offset
        if offset + num_bits > 8:
            packed[..., byte + 1] |= eights[..., i] >> (8 - offset)
    words = packed.view(rows, -1).view(torch.int32)
    return words[:, : packed_words(n, num_bits)].contiguous()


def unpack_bits(words: Tensor, num_bits: int, columns: int) -> Tensor:
    """int32 words [rows, ceil(n*b/32)] to signed int8 codes [rows, n = columns]."""
    _check_bits(num_bits)
    rows, stored = words.shape
    assert stored == packed_words(columns, num_bits), (stored, columns, num_bits)
    chunks = -(-columns // CHUNK)
    padded = torch.zeros(rows, chunks * num_bits, dtype=torch.int32, device=words.device)
    padded[:, :stored] = words
    packed = padded.view(torch.uint8).view(rows, -1, num_bits)
    codes = torch.empty(rows, chunks * CHUNK // 8, 8, dtype=torch.uint8, device=words.device)
    for i in range(8):
        byte, offset = divmod(i * num_bits, 8)
        value = packed[..., byte] >> offset
        if offset + num_bits > 8:
            value |= packed[..., byte + 1] << (8 - offset)
        codes[..., i] = value
    codes &= (1 << num_bits) - 1
    codes -= 1 << (num_bits - 1)
    return codes.view(torch.int8).view(rows, -1)[:, :columns].contiguous()


def padded_words(columns: int, num_bits: int) -> int:
    """Number of int32 words that hold `columns` codes where no code crosses words."""
    return -(-columns // (32 // num_bits))


def unpack_padded(words: Tensor, num_bits: int, columns: int) -> Tensor:
    """int32 words [rows, padded_words] to signed int8 codes [rows, n = columns].

    What compressed-tensors wrote before its dense bitstream: a word holds 32 // b whole codes from
    its low bits up, the bits above them are unused. Only 3, 5, 6 and 7 bits differ from the dense
    one. Read, never written.
    """
    _check_bits(num_bits)
    rows, stored = words.shape
    assert stored == padded_words(columns, num_bits), (stored, columns, num_bits)
    shifts = torch.arange(32 // num_bits, dtype=torch.int32, device=words.device) * num_bits
    unsigned = (words.unsqueeze(-1) >> shifts) & ((1 << num_bits) - 1)
    codes = unsigned.view(rows, -1)[:, :columns] - (1 << (num_bits - 1))
    return codes.to(torch.int8)


def pack_e2m1(codes: Tensor) -> Tensor:
    """E2M1 elements float8_e4m3fn [rows, n] to uint8 [rows, n/2], n even, the first of two lower.

    A nibble is the sign (bit 3) and the index of the magnitude in 0, 0.5, 1, 1.5, 2, 3, 4, 6.
    """
    bits = codes.view(torch.uint8)
    magnitude = bits & 0x7F  # E4M3: 0.5 is 0x30; from 1, 0x38, on every E2M1 step is 4 of its own
    index = torch.where(magnitude < 0x38, (magnitude > 0).to(torch.uint8), (magnitude >> 2) - 12)
    nibbles = index | ((bits >> 4) & 8)
    return nibbles[:, ::2] | (nibbles[:, 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """uint8 [rows, n/2] to E2M1 elements float8_e4m3fn [rows, n]; the inverse of `pack_e2m1`."""
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    index = nibbles & 7
    bits = torch.where(index < 2, index * 0x30, (index + 12) << 2) | ((nibbles & 8) << 4)
    return bits.view(torch.float8_e4m3fn)


def _check_bits(num_bits: int) -> None:
    if not 1 <= num_bits <= 8:
        raise ValueError(f"num_bits must be 1 to 8, got {num_bits}")
