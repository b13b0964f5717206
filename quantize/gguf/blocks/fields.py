"""The bit fields that blocks are made of, each with its inverse.

All work on uint8 [n, bytes] and codes of many blocks at once. Codes of 256-weight types lie in
rows of 32: bits of several rows share a byte, row by row from the lowest bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROW = 32  # weights whose fields lie in consecutive bytes


def to_half_bytes(x: Tensor) -> Tensor:
    """float32 [n, k] to the bytes of its float16 rounding, uint8 [n, 2 * k]."""
    return x.to(torch.float16).contiguous().view(torch.uint8)


def from_half_bytes(data: Tensor) -> Tensor:
    """uint8 [n, 2 * k] read as float16, as float32 [n, k]."""
    return data.contiguous().view(torch.float16).float()


def to_nibbles(q: Tensor) -> Tensor:
    """Low four bits of codes uint8 [n, 32] to uint8 [n, 16]: byte j holds codes j and j + 16."""
    low = q & 0x0F
    return low[:, :16] | low[:, 16:] << 4


def from_nibbles(data: Tensor) -> Tensor:
    """uint8 [n, 16] to codes uint8 [n, 32]."""
    return torch.cat([data & 0x0F, data >> 4], -1)


def to_fifth_bits(q: Tensor) -> Tensor:
    """Bit 4 of codes uint8 [n, 32] to uint8 [n, 4]: code j is bit j % 8 of byte j // 8."""
    bits = (q >> 4 & 1).view(-1, 4, 8)
    return (bits << shifts(8, 1, q)).sum(-1, dtype=torch.uint8)


def from_fifth_bits(data: Tensor) -> Tensor:
    """uint8 [n, 4] to uint8 [n, 32], each 16 or 0."""
    return ((data.unsqueeze(-1) >> shifts(8, 1, data) & 1) << 4).flatten(1)


def to_rows(q: Tensor, bits: int) -> Tensor:
    """Codes uint8 [n, k] below 2^bits to uint8 [n, k * bits / 8]: 8 / bits rows of 32 codes share
    32 bytes, the first row in the lowest bits."""
    per_byte = 8 // bits
    rows = q.view(len(q), -1, per_byte, ROW)
    return (rows << shifts(per_byte, bits, q).view(-1, 1)).sum(2, dtype=torch.uint8).flatten(1)


def from_rows(data: Tensor, bits: int) -> Tensor:
    """The inverse of `to_rows`."""
    rows = data.reshape(len(data), -1, 1, ROW) >> shifts(8 // bits, bits, data).view(-1, 1)
    return (rows & (1 << bits) - 1).flatten(1)


def to_six_bit_pairs(scales: Tensor, mins: Tensor) -> Tensor:
    """8 scales and 8 minimums of six bits, uint8 [n, 8] each, to uint8 [n, 12].

    Bytes 0-3 and 4-7: scale and minimum 0-3, with the top two bits of scale and minimum 4-7 above
    them; bytes 8-11: the low four bits of scale 4-7, those of minimum 4-7 above them.
    """
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = mins[:, :4] | mins[:, 4:] >> 4 << 6
    return torch.cat([first, second, (scales[:, 4:] & 0x0F) | mins[:, 4:] << 4], -1)


def from_six_bit_pairs(data: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [n, 12] to scales and minimums uint8 [n, 8]."""
    first, second, low = data.split(4, -1)
    scales = torch.cat([first & 63, low & 0x0F | first >> 6 << 4], -1)
    mins = torch.cat([second & 63, low >> 4 | second >> 6 << 4], -1)
    return scales, mins


def to_six_bits(q: Tensor) -> Tensor:
    """16 codes of six bits, uint8 [n, 16], to uint8 [n, 12]: the low four bits of code j and j + 8
    share byte j; the high two bits of codes j, j + 4, j + 8, j + 12 share byte 8 + j."""
    low = q & 0x0F
    high = (q >> 4).view(-1, 4, 4) << shifts(4, 2, q).view(4, 1)
    return torch.cat([low[:, :8] | low[:, 8:] << 4, high.sum(1, dtype=torch.uint8)], -1)


def from_six_bits(data: Tensor) -> Tensor:
    """uint8 [n, 12] to codes uint8 [n, 16]."""
    low = torch.cat([data[:, :8] & 0x0F, data[:, :8] >> 4], -1)
    high = data[:, None, 8:] >> shifts(4, 2, data).view(4, 1) & 3
    return low | high.flatten(1) << 4


def to_bits(bits: Tensor) -> Tensor:
    """bool [n, k] to uint8 [n, k / 8]: bit j of a byte is entry j of its eight."""
    eight = bits.view(len(bits), -1, 8).to(torch.uint8)
    return (eight << shifts(8, 1, bits)).sum(-1, dtype=torch.uint8)


def from_bits(data: Tensor) -> Tensor:
    """uint8 [n, k] to uint8 [n, 8 * k] of zeros and ones."""
    return (data.unsqueeze(-1) >> shifts(8, 1, data) & 1).flatten(1)


def to_bytes(words: Tensor, count: int) -> Tensor:
    """Words int64 [n, k] to uint8 [n, k * count], the lowest byte first."""
    at = torch.arange(0, 8 * count, 8, device=words.device)
    return (words.unsqueeze(-1) >> at & 255).to(torch.uint8).flatten(1)


def from_bytes(data: Tensor, count: int) -> Tensor:
    """The inverse of `to_bytes`: int64 [n, k]."""
    parts = data.reshape(len(data), -1, count).to(torch.int64)
    return (parts << torch.arange(0, 8 * count, 8, device=data.device)).sum(-1)


def shifts(count: int, bits: int, like: Tensor) -> Tensor:
    """0, bits, 2 * bits, ... as uint8 [count] on the device of `like`."""
    return torch.arange(0, count * bits, bits, dtype=torch.uint8, device=like.device)
