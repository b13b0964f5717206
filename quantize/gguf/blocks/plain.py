"""The types that are no blocks: F32, F16, BF16."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Codec
from .fields import from_half_bytes, to_half_bytes


class F32(Codec):
    name, block, nbytes = "F32", 1, 4

    @classmethod
    def encode_blocks(cls, x: Tensor, importance: Tensor | None) -> Tensor:
        return x.contiguous().view(torch.uint8)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        return data.contiguous().view(torch.float32)


class F16(Codec):
    name, block, nbytes = "F16", 1, 2

    @classmethod
    def encode_blocks(cls, x: Tensor, importance: Tensor | None) -> Tensor:
        return to_half_bytes(x)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        return from_half_bytes(data)


class BF16(Codec):
    name, block, nbytes = "BF16", 1, 2

    @classmethod
    def encode_blocks(cls, x: Tensor, importance: Tensor | None) -> Tensor:
        return x.to(torch.bfloat16).view(torch.uint8)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        return data.contiguous().view(torch.bfloat16).float()
