"""IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S: 256 weights as points of a grid, with signs apart.

A sub-block of 16 or 32 weights has a scale of four bits under the block's float16; each 8 weights
have their signs in a byte, or in seven bits, where the eighth sign is such that an even number is
negative: the encoder then gives the weight whose error costs least the wrong one.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from . import fields
from .base import Codec
from .fields import from_half_bytes, to_half_bytes
from .grid_search import Trials, grid_search
from .grids import grid
from .search import error_weights, nearest, sum_columns

BLOCK = 256


class Parts(NamedTuple):
    """The fields of n blocks: d float16 or its bytes [n, 1]; uint8 scales [n, 256 / sub]; signs
    uint8 [n, 32], a bit of each weight; points int64 [n, 256 / width]."""

    d: Tensor
    scales: Tensor
    signs: Tensor
    points: Tensor


class GridCodec(Codec):
    """`sub`: weights that share a scale. `even_signs`: stored in seven bits. `fudge`: what d is
    multiplied by. `square_factor`: of the block's mean square in the error's weights. `smallest`:
    sub-blocks below count as zero. `scale_parts`: the value is d * (scale + 1/2) * it * grid."""

    block = BLOCK
    uses_importance = True
    slice_weights = 1 << 15  # a search has many candidates for each weight
    sub: ClassVar[int]
    trials: ClassVar[Trials]
    even_signs: ClassVar[bool] = False
    fudge: ClassVar[float] = 1.0
    square_factor: ClassVar[float] = 2.0
    smallest: ClassVar[float] = 1e-8
    scale_part: ClassVar[float]

    @classmethod
    def encode_blocks(cls, x: Tensor, importance: Tensor | None) -> Tensor:
        points = grid(cls.name, str(x.device))
        width = points.levels.shape[1]
        weight = cls.weights(x, importance)
        columns, weight = (t.reshape(-1, cls.sub).T.contiguous() for t in (x, weight))
        negative = columns < 0
        size = columns.abs()
        if cls.even_signs:
            size, negative = with_even_signs(columns, weight, size, negative)
        dead = ~(size.amax(0) >= cls.smallest) if cls.smallest else size.amax(0) == 0
        groups = (cls.sub // width, width, -1)
        fit = grid_search(size.view(groups), weight.view(groups), points, cls.trials, dead)
        negative = (negative ^ fit.flipped).masked_fill_(fit.dead, False)
        signs = fields.to_bits(negative.T.reshape(-1, BLOCK))
        scale = fit.scale.view(len(x), -1)
        d = scale.amax(-1, keepdim=True) / torch.tensor(31.0, device=x.device)
        codes = nearest(0.5 * (scale * (1 / d) - 1)).clamp_(0, 15)
        codes = torch.where(d == 0, 0, codes).to(torch.uint8)
        d = (d * cls.fudge).to(torch.float16)
        return cls.pack(Parts(d, codes, signs, fit.points.T.reshape(len(x), -1)))

    @classmethod
    def weights(cls, x: Tensor, importance: Tensor | None) -> Tensor:
        """Error weights of blocks [n, 256]."""
        square = cls.square_factor * sum_columns((x * x).T.contiguous()) / BLOCK
        if importance is not None:
            return error_weights(x, importance, square.view(-1, 1))
        return cls.own_weights(x, square.view(-1, 1))

    @classmethod
    def own_weights(cls, x: Tensor, square: Tensor) -> Tensor:
        """The same where nothing else is known; square: `square_factor` times the mean square."""
        return x * x

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        parts = cls.unpack(data)
        points = grid(cls.name, str(data.device))
        scale = from_half_bytes(parts.d) * (0.5 + parts.scales) * cls.scale_part
        values = points.values[parts.points].view(len(data), -1, cls.sub)
        signs = 1 - 2 * fields.from_bits(parts.signs).view(values.shape).float()
        return (scale.unsqueeze(-1) * values * signs).flatten(1)

    @classmethod
    @abstractmethod
    def pack(cls, parts: Parts) -> Tensor:
        """Fields to uint8 [n, nbytes]."""

    @classmethod
    @abstractmethod
    def unpack(cls, data: Tensor) -> Parts:
        """uint8 [n, nbytes] to the fields; d as bytes [n, 2]."""


def with_even_signs(
    x: Tensor, weight: Tensor, size: Tensor, negative: Tensor
) -> tuple[Tensor, Tensor]:
    """Magnitudes and signs of x [sub, n] with an even number of negative ones in each 8 weights:
    where it is odd, the weight of least weighted square gets the other sign and a magnitude below
    zero."""
    shape = (len(x) // 8, 8, -1)
    cost = (weight * x * x).view(shape)
    odd = negative.view(shape).sum(1, keepdim=True) % 2 == 1
    cheapest = torch.zeros(cost.shape, dtype=torch.bool, device=x.device)
    cheapest.scatter_(1, cost.argmin(1, keepdim=True), odd)
    cheapest = cheapest.view(x.shape)
    return torch.where(cheapest, -size, size), negative ^ cheapest


def words_with_scale(signs: Tensor, scales: Tensor) -> Tensor:
    """Four sevens of sign bits and four bits of scale: uint8 [n, 32] and [n, 8] to [n, 32]."""
    seven = (signs & 127).view(len(signs), -1, 4).to(torch.int64)
    word = (seven << torch.arange(0, 28, 7, device=signs.device)).sum(-1)
    word |= scales.to(torch.int64) << 28
    return fields.to_bytes(word, 4)


def from_words_with_scale(data: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse: signs uint8 [n, 32], the eighth made up, and scales uint8 [n, 8]."""
    word = fields.from_bytes(data, 4)
    seven = word.unsqueeze(-1) >> torch.arange(0, 28, 7, device=data.device) & 127
    return eighth_sign(seven.flatten(1)), (word >> 28).to(torch.uint8)


def eighth_sign(seven: Tensor) -> Tensor:
    """Seven sign bits int64 as uint8 with the eighth that makes them even."""
    parity = seven ^ seven >> 4
    parity = parity ^ parity >> 2
    return (seven | ((parity ^ parity >> 1) & 1) << 7).to(torch.uint8)


def to_pairs(q: Tensor) -> Tensor:
    """Four-bit codes uint8 [n, k] to uint8 [n, k / 2], the first in the low bits."""
    return q[:, 0::2] | q[:, 1::2] << 4


def from_pairs(data: Tensor) -> Tensor:
    return torch.stack([data & 0x0F, data >> 4], -1).flatten(1)


class IQ2_XXS(GridCodec):
    """d; for each 32 weights 4 bytes of points, 28 sign bits and 4 of scale."""

    name, nbytes, sub, scale_part = "IQ2_XXS", 66, 32, 0.25
    trials = Trials(6, 0.1, "all", positive_start=True)
    even_signs, needs_importance, square_factor, smallest = True, True, 1.0, 1e-15

    @classmethod
    def pack(cls, parts: Parts) -> Tensor:
        points = parts.points.to(torch.uint8).view(-1, 8, 4)
        words = words_with_scale(parts.signs, parts.scales).view(-1, 8, 4)
        return torch.cat([to_half_bytes(parts.d), torch.cat([points, words], -1).flatten(1)], -1)

    @classmethod
    def unpack(cls, data: Tensor) -> Parts:
        points, words = data[:, 2:].reshape(-1, 8, 8).split(4, -1)
        signs, scales = from_words_with_scale(words.flatten(1))
        return Parts(data[:, :2], scales, signs, points.flatten(1).to(torch.int64))


class IQ2_XS(GridCodec):
    """d; 32 words of 9 bits of point and 7 of signs; 8 bytes of scales."""

    name, nbytes, sub, scale_part = "IQ2_XS", 74, 16, 0.25
    trials = Trials(9, 0.1, "off")
    even_signs, needs_importance, square_factor, smallest = True, True, 1.0, 1e-15

    @classmethod
    def pack(cls, parts: Parts) -> Tensor:
        words = parts.points | (parts.signs & 127).to(torch.int64) << 9
        return torch.cat(
            [to_half_bytes(parts.d), fields.to_bytes(words, 2), to_pairs(parts.scales)], -1
        )

    @classmethod
    def unpack(cls, data: Tensor) -> Parts:
        words = fields.from_bytes(data[:, 2:66], 2)
        return Parts(data[:, :2], from_pairs(data[:, 66:]), eighth_sign(words >> 9), words & 511)


class IQ2_S(GridCodec):
    """d; 32 bytes of points, low bits; 32 of signs; 8 of the points' high two bits; 8 of scales."""

    name, nbytes, sub, scale_part, fudge = "IQ2_S", 82, 16, 0.25, 0.9875
    trials = Trials(9, 0.1, "off")

    @classmethod
    def own_weights(cls, x: Tensor, square: Tensor) -> Tensor:
        return 0.25 * square + x * x

    @classmethod
    def pack(cls, parts: Parts) -> Tensor:
        high = (parts.points >> 8).view(-1, 8, 4) << torch.arange(0, 8, 2, device=parts.d.device)
        points = parts.points & 255, parts.signs, high.sum(-1), to_pairs(parts.scales)
        return torch.cat([to_half_bytes(parts.d), *(p.to(torch.uint8) for p in points)], -1)

    @classmethod
    def unpack(cls, data: Tensor) -> Parts:
        d, low, signs, high, scales = data.split([2, 32, 32, 8, 8], -1)
        high = (high.unsqueeze(-1) >> fields.shifts(4, 2, data) & 3).flatten(1)
        return Parts(d, from_pairs(scales), signs, low.to(torch.int64) | high.to(torch.int64) << 8)


class IQ3_XXS(GridCodec):
    """d; 64 bytes of points; for each 32 weights 28 sign bits and 4 of scale."""

    name, nbytes, sub, scale_part, fudge = "IQ3_XXS", 98, 32, 0.5, 1.0125
    trials = Trials(15, 0.2, "off")
    even_signs = True

    @classmethod
    def pack(cls, parts: Parts) -> Tensor:
        words = words_with_scale(parts.signs, parts.scales)
        return torch.cat([to_half_bytes(parts.d), parts.points.to(torch.uint8), words], -1)

    @classmethod
    def unpack(cls, data: Tensor) -> Parts:
        d, points, words = data.split([2, 64, 32], -1)
        signs, scales = from_words_with_scale(words)
        return Parts(d, scales, signs, points.to(torch.int64))


class IQ3_S(GridCodec):
    """d; 64 bytes of points, low bits; 8 of their ninth bits; 32 of signs; 4 of scales."""

    name, nbytes, sub, scale_part, fudge, smallest = "IQ3_S", 110, 32, 2.0, 1.033, 0.0
    trials = Trials(9, 0.2, "any")

    @classmethod
    def pack(cls, parts: Parts) -> Tensor:
        low, high = (parts.points & 255).to(torch.uint8), fields.to_bits(parts.points >= 256)
        return torch.cat(
            [to_half_bytes(parts.d), low, high, parts.signs, to_pairs(parts.scales)], -1
        )

    @classmethod
    def unpack(cls, data: Tensor) -> Parts:
        d, low, high, signs, scales = data.split([2, 64, 8, 32, 4], -1)
        points = low.to(torch.int64) | fields.from_bits(high).to(torch.int64) << 8
        return Parts(d, from_pairs(scales), signs, points)
