"""Pack and unpack twins: signed codes to the words that checkpoints store, and back.

The compressed-tensors bitstream: code i of a row occupies bits [i*b, (i+1)*b) of a dense
little-endian stream, cut into int32 words; the stored value is code + 2^(b-1). A row of n codes
takes ceil(n*b/32) words, the unused top bits are zero. 32 codes fill exactly b words, so rows are
handled in chunks of 32 codes. Elements of 4-bit floats are packed two to a byte.
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
    padded = -(-n // CHUNK) * CHUNK
    unsigned = torch.zeros(rows, padded, dtype=torch.int64, device=codes.device)
    unsigned[:, :n] = codes.to(torch.int64) + (1 << (num_bits - 1))
    chunks = unsigned.view(rows, -1, CHUNK)
    words = torch.zeros(rows, chunks.shape[1], num_bits, dtype=torch.int64, device=codes.device)
    for i in range(CHUNK):
        word, offset = divmod(i * num_bits, 32)
        words[..., word] |= chunks[..., i] << offset
        if offset + num_bits > 32:
            words[..., word + 1] |= chunks[..., i] >> (32 - offset)
    words = (words & 0xFFFFFFFF).reshape(rows, -1)[:, : packed_words(n, num_bits)]
    return _to_int32(words)


def unpack_bits(words: Tensor, num_bits: int, columns: int) -> Tensor:
    """int32 words [rows, ceil(n*b/32)] to signed int8 codes [rows, n = columns]."""
    _check_bits(num_bits)
    rows, stored = words.shape
    assert stored == packed_words(columns, num_bits), (stored, columns, num_bits)
    chunks = -(-columns // CHUNK)
    padded = torch.zeros(rows, chunks * num_bits, dtype=torch.int64, device=words.device)
    padded[:, :stored] = words.to(torch.int64) & 0xFFFFFFFF
    grouped = padded.view(rows, chunks, num_bits)
    codes = torch.empty(rows, chunks, CHUNK, dtype=torch.int8, device=words.device)
    mask, half = (1 << num_bits) - 1, 1 << (num_bits - 1)
    for i in range(CHUNK):
        word, offset = divmod(i * num_bits, 32)
        value = grouped[..., word] >> offset
        if offset + num_bits > 32:
            value = value | (grouped[..., word + 1] << (32 - offset))
        codes[..., i] = ((value & mask) - half).to(torch.int8)
    return codes.view(rows, -1)[:, :columns].contiguous()


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


def _to_int32(words: Tensor) -> Tensor:
    """Unsigned 32-bit values held in int64 to the int32 with the same bits."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _check_bits(num_bits: int) -> None:
    if not 1 <= num_bits <= 8:
        raise ValueError(f"num_bits must be 1 to 8, got {num_bits}")
