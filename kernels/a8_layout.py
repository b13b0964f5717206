"""How the GPU kernel of 8-bit activations holds a weight: W8A8, FP8 and W4A8.

8-bit codes stay as they are, [N, K] bytes. 4-bit ones go two to a byte, in tiles of 128 columns:
byte i of a row's 64 holds column i in its low half and column 64 + i in its high half, as signed
halves. A half moved to the top of a byte is 16 times the code as a signed byte, so unpacking is one
and (and one shift for low halves) for four codes; the 16 is taken out of the scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 128
HALF = TILE // 2


class A8Weight(NamedTuple):
    """codes: int8 or float8_e4m3fn [N, K], or int8 [tiles, N, 64] of packed 4-bit ones. scale:
    float32 [groups, N]. locks: int32, zero between launches."""

    codes: Tensor
    scale: Tensor
    locks: Tensor


def pack_halves(codes: Tensor) -> Tensor:
    """Signed 4-bit codes int8 [N, K] to bytes int8 [tiles, N, 64], K filled up with zeros."""
    rows, columns = codes.shape
    padded = F.pad(codes, (0, -columns % TILE)).view(rows, -1, 2, HALF).to(torch.int16)
    packed = (padded[:, :, 0] & 15) | (padded[:, :, 1] << 4)
    return packed.to(torch.int8).transpose(0, 1).contiguous()


def unpack_halves(packed: Tensor, columns: int) -> Tensor:
    """int8 [tiles, N, 64] to signed codes int8 [N, columns]; undoes `pack_halves`."""
    tiles, rows, _ = packed.shape
    wide = packed.to(torch.int16)
    low = ((wide & 15) ^ 8) - 8
    halves = torch.stack((low, wide >> 4), dim=2)  # [tiles, N, 2, 64]
    return halves.permute(1, 0, 2, 3).reshape(rows, -1)[:, :columns].to(torch.int8)
