"""How the GPU kernel of W2/W3/W4/W8A16 holds a weight: the twins that make the layout and undo it.

Codes [N, K] are cut along K into tiles, and a tile into planes of 32 words of 16 bits a row, so
that a thread loads 8 words of a row (16 bytes) and a warp one run of 512. A code of b bits is split
into planes whose widths are the powers of two that sum to b (3 = 2 + 1); word i of a plane of width
w holds, from its low bits up, the columns i, 32 + i, 64 + i, ...: shifting all words by w steps
from one run of 32 columns to the next, and two words in a register hold two neighbours, as tensor
cores want them. Codes are stored unsigned (plus 2^(b-1)).

Scales are [groups, N]; with zero-points both share 32 bits, so that one load fetches them: a
float32 scale whose lowest 8 bits of 24 in the significand are the unsigned zero-point instead. That
rounds the scale to 16 bits of significand: float16 and bfloat16 scales are exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

RUN = 32  # columns that one shift of a plane's words gives
PLANE_WIDTHS = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
"""Supported widths of codes, and the widths of their planes, lowest bits first."""


def tile_columns(num_bits: int) -> int:
    """Columns of a tile: those of one plane of the narrowest width, at least 128."""
    return max(RUN * 16 // PLANE_WIDTHS[num_bits][-1], 128)


def tile_planes(num_bits: int) -> int:
    """Planes of 32 words a row in a tile: 1; 2 for 8 bits; 3 for 3 (two of width 2, one of 1)."""
    return tile_columns(num_bits) * num_bits // (RUN * 16)


class WNA16Format(NamedTuple):
    """What the codes are. group_size 0: one scale a row. asymmetric: zero-points ride in scales."""

    num_bits: int
    group_size: int
    asymmetric: bool


class PackedWeight(NamedTuple):
    """A weight in the kernel's layout.

    words: int16 [tiles, planes, N, 32]. scale: int32 [groups of the padded K, N], see
    `pack_scales`. locks: int32, zero between launches: how many programs of a tile are done.
    """

    words: Tensor
    scale: Tensor
    locks: Tensor


def decline_groups(num_bits: int, group_size: int) -> str | None:
    """Why the kernel cannot take groups of `group_size` columns (0: one a row), or None."""
    tile = tile_columns(num_bits)
    if group_size % RUN:
        return f"takes groups of a multiple of {RUN} columns, not {group_size}"
    if group_size and tile % group_size and group_size % tile:
        return f"groups must divide {tile} columns or be a multiple of them, not {group_size}"
    return None


def pack_words(unsigned: Tensor, num_bits: int) -> Tensor:
    """Unsigned codes uint8 [N, K] to int16 [tiles, planes, N, 32]; K is filled up with zeros."""
    columns = tile_columns(num_bits)
    rows, given = unsigned.shape
    codes = F.pad(unsigned, (0, -given % columns)).to(torch.int32)
    tiles = codes.view(rows, -1, columns).transpose(0, 1)  # [tiles, N, columns]
    planes, offset = [], 0
    for width in PLANE_WIDTHS[num_bits]:
        bits = (tiles >> offset) & ((1 << width) - 1)
        runs = bits.reshape(len(tiles), rows, -1, 16 // width, RUN)
        shifts = torch.arange(0, 16, width, dtype=torch.int32, device=codes.device)
        words = (runs << shifts.view(-1, 1)).sum(3, dtype=torch.int32)
        planes.append(words.transpose(1, 2))
        offset += width
    return torch.cat(planes, dim=1).to(torch.int16).contiguous()


def unpack_words(words: Tensor, num_bits: int, columns: int) -> Tensor:
    """int16 [tiles, planes, N, 32] to unsigned codes uint8 [N, columns]; undoes `pack_words`."""
    tiles, _, rows, _ = words.shape
    unsigned = torch.zeros(
        tiles, rows, tile_columns(num_bits), dtype=torch.int32, device=words.device
    )
    start, offset = 0, 0
    for width in PLANE_WIDTHS[num_bits]:
        count = tile_columns(num_bits) * width // (RUN * 16)
        plane = words[:, start : start + count].transpose(1, 2).to(torch.int32)
        shifts = torch.arange(0, 16, width, dtype=torch.int32, device=words.device)
        bits = (plane.unsqueeze(3) >> shifts.view(-1, 1)) & ((1 << width) - 1)
        unsigned |= bits.reshape(tiles, rows, -1) << offset
        start, offset = start + count, offset + width
    return unsigned.transpose(0, 1).reshape(rows, -1)[:, :columns].to(torch.uint8)


def pack_scales(scale: Tensor, zero: Tensor | None) -> Tensor:
    """Scales float32 and unsigned zero-points or None, [N, groups], to int32 [groups, N]."""
    bits = scale.float().T.contiguous().view(torch.int32)
    if zero is None:
        return bits
    rounded = (bits + 0x7F + ((bits >> 8) & 1)) & ~0xFF  # to the nearest 16 bits, ties to even
    return rounded | zero.T.to(torch.int32)


def unpack_scales(packed: Tensor, asymmetric: bool) -> tuple[Tensor, Tensor | None]:
    """int32 [groups, N] to scales float32 [N, groups] and unsigned zero-points uint8, or None."""
    if not asymmetric:
        return packed.view(torch.float32).T.contiguous(), None
    scale = (packed & ~0xFF).view(torch.float32).T.contiguous()
    return scale, (packed & 0xFF).to(torch.uint8).T.contiguous()
