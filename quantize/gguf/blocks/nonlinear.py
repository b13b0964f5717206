"""IQ4_NL and IQ4_XS: 4-bit codes that name one of 16 unevenly spaced values.

value = scale * VALUES[code]. IQ4_NL has one float16 scale for 32 weights; IQ4_XS 256 weights, whose
8 scales of 6 bits share one. A scaled weight takes the nearest value, the upper one half-way; the
places half-way are multiples of 1/2, so doubled and rounded down it is an index into a table.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from . import fields
from .fields import from_half_bytes, to_half_bytes
from .legacy import reciprocal
from .scaled import Fitted, ScaledCodec, Scales
from .search import (
    EPSILON,
    best_projection,
    column,
    error_weights,
    extreme,
    f32,
    nearest,
    sum_columns,
)

VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
REACH = 256  # of the table, in halves, on either side of 0
TRIES = 7  # on either side of the value that the largest weight takes first


class NonlinearCodec(ScaledCodec):
    """A code, uint8, is the place of its level in VALUES."""

    sub, low, high, code_dtype = 32, VALUES[0], VALUES[-1], torch.uint8
    uses_importance = True

    @classmethod
    def encode_blocks(cls, x: Tensor, importance: Tensor | None) -> Tensor:
        if importance is None:
            return cls.packed(cls.fit(x, x * x))
        square = sum_columns((x * x).T.contiguous()) * (2 / cls.block)
        return cls.packed(cls.fit(x, error_weights(x, importance, square.view(-1, 1))))

    @classmethod
    def nearest(cls, scaled: Tensor) -> tuple[Tensor, Tensor]:
        codes = nearest_codes(scaled)
        return codes, tables(str(scaled.device)).values[codes.int()]

    @classmethod
    def search(cls, x: Tensor, weight: Tensor) -> Tensor:
        """The scale of each 32 weights of blocks [n, block]: float32 [n, block / 32]."""
        columns, weight = (t.reshape(-1, 32).T.contiguous() for t in (x, weight))
        return search_scale(columns, weight).view(len(x), -1)


class IQ4_NL(NonlinearCodec):
    """d; 16 bytes of codes."""

    name, block, nbytes = "IQ4_NL", 32, 18

    @classmethod
    def fit(cls, x: Tensor, weight: Tensor) -> Fitted:
        d = cls.search(x, weight)
        half = d.to(torch.float16)
        return Fitted(Scales(half.float(), None, (half,)), nearest_codes(x * reciprocal(d)))

    @classmethod
    def pack(cls, d: Tensor, codes: Tensor) -> Tensor:
        """d float16 [n, 1]; codes uint8 [n, 32] to [n, nbytes]."""
        return torch.cat([to_half_bytes(d), fields.to_nibbles(codes)], -1)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        values = tables(str(data.device)).values[fields.from_nibbles(data[:, 2:]).int()]
        return from_half_bytes(data[:, :2]) * values


class IQ4_XS(NonlinearCodec):
    """d; 2 bytes with the high bits of 8 scales, 4 with the low ones, minus 32; 128 of codes."""

    name, block, nbytes = "IQ4_XS", 256, 136

    @classmethod
    def fit(cls, x: Tensor, weight: Tensor) -> Fitted:
        own = cls.search(x, weight)
        d = -extreme(own, -1) / 32
        scales = nearest(reciprocal(d) * own).clamp_(-32, 31)
        inverse = reciprocal(d * scales)
        codes = nearest_codes(x.view(-1, 8, 32) * inverse.unsqueeze(-1)).view(len(x), -1)
        half = d.to(torch.float16)
        return Fitted(Scales(half.float() * scales, None, (half, scales.to(torch.int8))), codes)

    @classmethod
    def pack(cls, d: Tensor, scales: Tensor, codes: Tensor) -> Tensor:
        """d float16 [n, 1]; scales int8 [n, 8]; codes uint8 [n, 256] to [n, nbytes]."""
        packed = (scales + 32).view(torch.uint8)
        low = packed[:, 0::2] & 0x0F | packed[:, 1::2] << 4
        high = (packed >> 4).view(-1, 2, 4) << fields.shifts(4, 2, packed)
        nibbles = fields.to_nibbles(codes.reshape(-1, 32)).view(-1, 128)
        return torch.cat([to_half_bytes(d), high.sum(-1, dtype=torch.uint8), low, nibbles], -1)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        d, high, low, codes = data.split([2, 2, 4, 128], -1)
        low = torch.stack([low & 0x0F, low >> 4], -1).flatten(1)
        high = (high.unsqueeze(-1) >> fields.shifts(4, 2, data) & 3).flatten(1)
        scales = from_half_bytes(d) * ((low | high << 4).view(torch.int8) - 32)
        q = fields.from_nibbles(codes.reshape(-1, 16)).view(-1, 8, 32)
        return (scales.unsqueeze(-1) * tables(str(data.device)).values[q.int()]).flatten(1)


class Tables:
    """`values` float32 [16]; `codes` uint8: of the nearest value at -REACH / 2 .. REACH / 2."""

    def __init__(self, device: str) -> None:
        self.values = torch.tensor(VALUES, dtype=torch.float32, device=device)
        halfway = self.values[1:] + self.values[:-1]  # doubled, as the index is
        at = torch.arange(-REACH, REACH, device=device)
        self.codes = torch.bucketize(at, halfway, right=True).to(torch.uint8)
        self.nearest = self.values[self.codes.int()]


@cache
def tables(device: str) -> Tables:
    return Tables(device)


def table_index(scaled: Tensor) -> Tensor:
    """Where the tables have scaled weights; NaN counts as above them all."""
    doubled = (scaled * 2).floor_().nan_to_num_(REACH, REACH, -REACH)
    return doubled.clamp_(-REACH, REACH - 1).add_(REACH).to(torch.int32)


def nearest_codes(scaled: Tensor) -> Tensor:
    return tables(str(scaled.device)).codes[table_index(scaled)]


def search_scale(x: Tensor, weight: Tensor) -> Tensor:
    """The scale of each column of x [32, n] with least weighted squared error; 0 where x is.

    Trials put the weight of largest magnitude at 127, then at VALUES[0] + i, i = -7 .. 7.
    """
    largest = extreme(x, 0)
    dead = largest.abs() < EPSILON
    largest = torch.where(dead, 1.0, largest)
    tops = [f32(VALUES[0] + i) for i in range(-TRIES, TRIES + 1)]
    first = 1 / (-largest / column([f32(VALUES[0])], x))
    inverse = torch.cat([first, column(tops, x) / largest])
    xq, qq = torch.zeros_like(inverse), torch.zeros_like(inverse)
    values = tables(str(x.device)).nearest
    for c in range(len(x)):
        q = values[table_index(inverse * x[c])]
        weighted = weight[c] * q
        xq += weighted * x[c]
        qq += weighted.mul_(q)
    _, scale = best_projection(xq, qq.nan_to_num_(0.0, float("inf")))
    return scale.masked_fill_(dead[0], 0)
