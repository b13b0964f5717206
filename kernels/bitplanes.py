"""Codes held in memory at exactly their number of bits, in an order that unpacks fast.

A checkpoint's bitstream interleaves neighbouring codes, which plain tensor operations take apart
one bit position at a time. In memory the order is ours: a code of b bits is split into planes whose
widths are the powers of two that sum to b (3 = 2 + 1, 7 = 4 + 2 + 1), lowest bits first. A plane of
width w over C columns takes m = C*w/8 bytes a row, and byte j holds the columns j, j+m, j+2m, ...,
the first in its lowest bits. So each shift of a whole plane gives a contiguous run of columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLE = 8


def plane_widths(num_bits: int) -> list[int]:
    """Widths of the planes of a `num_bits` code, lowest bits first: 3 -> [2, 1], 8 -> [8]."""
    assert 1 <= num_bits <= 8, num_bits
    return [w for w in (8, 4, 2, 1) if num_bits & w]


def pack_planes(codes: Tensor, num_bits: int) -> Tensor:
    """Signed int8 codes [rows, n] to uint8 [rows, ceil(n/8) * num_bits]."""
    rows, n = codes.shape
    padded = -(-n // _MULTIPLE) * _MULTIPLE
    unsigned = torch.zeros(rows, padded, dtype=torch.uint8, device=codes.device)
    unsigned[:, :n] = (codes.to(torch.int16) + (1 << (num_bits - 1))).to(torch.uint8)
    planes, offset = [], 0
    for width in plane_widths(num_bits):
        bits = (unsigned >> offset) & ((1 << width) - 1)
        runs = bits.view(rows, 8 // width, padded * width // 8)
        plane = runs[:, 0].clone()
        for i in range(1, 8 // width):
            plane |= runs[:, i] << (i * width)
        planes.append(plane)
        offset += width
    return torch.cat(planes, dim=1)


def unpack_planes(packed: Tensor, num_bits: int, columns: int) -> Tensor:
    """uint8 [rows, ceil(n/8) * num_bits] to unsigned codes (signed + 2^(b-1)), uint8 [rows, n]."""
    rows = packed.shape[0]
    eighth = -(-columns // _MULTIPLE)
    assert packed.shape[1] == eighth * num_bits, (packed.shape, num_bits, columns)
    unsigned = torch.empty(rows, eighth * 8, dtype=torch.uint8, device=packed.device)
    start, offset = 0, 0
    for width in plane_widths(num_bits):
        m, mask = eighth * width, (1 << width) - 1
        plane = packed[:, start : start + m]
        for i in range(8 // width):
            run = unsigned[:, i * m : (i + 1) * m]
            bits = (plane >> (i * width)) & mask
            if offset:
                run |= bits << offset
            else:
                run.copy_(bits)
        start, offset = start + m, offset + width
    return unsigned[:, :columns]
