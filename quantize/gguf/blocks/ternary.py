"""TQ1_0 and TQ2_0: 256 weights of -1, 0 or 1 times the largest magnitude, for ternary models.

TQ2_0 stores 2 bits a weight. TQ1_0 stores five weights in a byte as the digits of a number to the
base 3, scaled from 243 to 256 and rounded up, so that multiplying by 3 brings a digit to the top.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import fields
from .base import Codec
from .fields import from_half_bytes, to_half_bytes
from .legacy import finite, reciprocal, round_half_away

BLOCK = 256
DIGITS = 5  # to the base 3 in a byte: 3^5 = 243
RUNS = ((32, 5), (16, 5), (4, 4))  # bytes, and weights in each of them


def levels_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale float32 [n, 1] and levels + 1 int32 [n, 256]."""
    d = x.abs().amax(-1, keepdim=True)
    return d, finite(round_half_away(x * reciprocal(d))).to(torch.int32) + 1


class TQ2_0(Codec):
    """64 bytes of codes; d."""

    name, block, nbytes = "TQ2_0", BLOCK, 66

    @classmethod
    def encode_blocks(cls, x: Tensor, importance: Tensor | None) -> Tensor:
        d, q = levels_of(x)
        return torch.cat([fields.to_rows((q & 3).to(torch.uint8), 2), to_half_bytes(d)], -1)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        levels = fields.from_rows(data[:, :64], 2).view(torch.int8) - 1
        return levels * from_half_bytes(data[:, 64:])


class TQ1_0(Codec):
    """32 bytes for weights 0-159, 16 for 160-239, 4 with four digits for the rest; d."""

    name, block, nbytes = "TQ1_0", BLOCK, 54

    @classmethod
    def encode_blocks(cls, x: Tensor, importance: Tensor | None) -> Tensor:
        d, q = levels_of(x)
        parts = []
        for run, (width, digits) in zip(q.split([w * k for w, k in RUNS], -1), RUNS, strict=True):
            number = torch.zeros(len(q), width, dtype=torch.int32, device=x.device)
            for digit in run.view(-1, digits, width).unbind(1):
                number = (number * 3 + digit) & 0xFF
            number = number * 3 ** (DIGITS - digits) & 0xFF
            parts.append(((number * 256 + 242) // 243).to(torch.uint8))
        return torch.cat([*parts, to_half_bytes(d)], -1)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        *runs, d = data.split([*(w for w, _ in RUNS), 2], -1)
        values = []
        for run, (_, digits) in zip(runs, RUNS, strict=True):
            powers = 3 ** torch.arange(digits, device=data.device).view(-1, 1)
            top = run.int().unsqueeze(1) * powers & 0xFF
            values.append(((top * 3 >> 8) - 1).flatten(1))
        return torch.cat(values, -1) * from_half_bytes(d)
