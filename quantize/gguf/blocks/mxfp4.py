"""MXFP4: 32 weights of one sign, two exponent bits and one mantissa bit under a power of two.

The format of OCP's microscaling specification. A byte holds the exponent of the scale, biased by
128 because the values are stored doubled; the largest magnitude is at least 4 times the scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import fields
from .base import Codec

MAGNITUDES = (0, 1, 2, 3, 4, 6, 8, 12)  # twice those of E2M1
HALFWAY = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)
BIAS = 127


class MXFP4(Codec):
    """One byte of exponent; 16 of nibbles, sign in the top bit."""

    name, block, nbytes = "MXFP4", 32, 17

    @classmethod
    def encode_blocks(cls, x: Tensor, importance: Tensor | None) -> Tensor:
        largest = x.abs().amax(-1, keepdim=True)
        exponent = largest.double().log2().float().floor().nan_to_num(0.0) - 2 + BIAS
        exponent = torch.where(largest > 0, exponent, 0.0).to(torch.int32) & 0xFF
        scale = exponent_scale(exponent)
        size, code = x.abs(), torch.zeros_like(x, dtype=torch.uint8)
        for halfway in HALFWAY:
            code += size > halfway * scale
        code |= ((x < 0) & (code > 0)).to(torch.uint8) << 3
        return torch.cat([exponent.to(torch.uint8), fields.to_nibbles(code)], -1)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        values = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=data.device).float()
        q = fields.from_nibbles(data[:, 1:])
        return exponent_scale(data[:, :1].int()) * values[q.int()]


def exponent_scale(exponent: Tensor) -> Tensor:
    """2^(exponent - 128), exponent int32 from 0 to 255; the two smallest are subnormal."""
    normal = (exponent - 1) << 23
    return torch.where(exponent < 2, 0x200000 << exponent.clamp(max=1), normal).view(torch.float32)
