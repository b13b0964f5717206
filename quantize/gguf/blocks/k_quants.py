"""The K types: 256 weights in sub-blocks whose small scales share one float16 scale.

Q2_K, Q4_K and Q5_K are affine: value = d * scale * q - dmin * minimum. Q3_K and Q6_K are symmetric:
value = d * scale * level. Each sub-block's own best scale is searched first; the scales of a block
are then rounded to a grid of their own, and the weights once more to what came of it.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from . import fields
from .fields import from_half_bytes, to_half_bytes
from .scaled import Fitted, ScaledCodec, Scales
from .search import (
    EPSILON,
    AffineFit,
    Fit,
    affine_search,
    descent_search,
    divide,
    error_weights,
    extreme,
    nearest,
    positive_search,
    square_root,
    sum_columns,
    symmetric_search,
)

BLOCK = 256


class KCodec(ScaledCodec):
    block = BLOCK
    uses_importance = True

    @classmethod
    def columns(cls, x: Tensor) -> Tensor:
        """Blocks [n, 256] to their sub-blocks in columns [sub, n * 256 / sub]."""
        return x.reshape(-1, cls.sub).T.contiguous()

    @classmethod
    def weights(cls, x: Tensor, importance: Tensor, factor: float) -> Tensor:
        """Error weights of blocks [n, 256], by `factor` times the block's mean square."""
        square = factor * sum_columns((x * x).T.contiguous()) / BLOCK
        return error_weights(x, importance, square.view(-1, 1))

    @classmethod
    def in_blocks(cls, columns: Tensor) -> Tensor:
        """Levels float32 [sub, n * 256 / sub] to int8 [n, 256]."""
        return columns.T.reshape(-1, BLOCK).to(torch.int8)


class AffineKCodec(KCodec):
    """`scale_high`: largest rounded scale and minimum; `trials`: of the search without importance
    (its first top level, the step, their number)."""

    low = 0
    scale_high: ClassVar[int]
    trials: ClassVar[tuple[float, float, int]]
    mean_square_factor: ClassVar[float] = 2.0

    @classmethod
    def encode_blocks(cls, x: Tensor, importance: Tensor | None) -> Tensor:
        if importance is not None:
            return cls.packed(cls.fit(x, cls.weights(x, importance, cls.mean_square_factor)))
        columns = cls.columns(x)
        weight = cls.own_weights(columns)
        fit = affine_search(columns, weight, cls.high, *cls.trials, absolute=cls.sub == 16)
        rounded = [cls.round_scales(s) for s in (fit.scale, fit.minimum)]
        return cls.packed(cls.requantized(columns, fit, rounded))

    @classmethod
    def fit(cls, x: Tensor, weight: Tensor) -> Fitted:
        columns, weight = cls.columns(x), cls.columns(weight)
        fit = affine_search(columns, weight, cls.high, -0.9, 0.05, 36, absolute=False)
        return cls.requantized(columns, fit, cls.search_scales(fit, sum_columns(weight)))

    @classmethod
    def requantized(
        cls, columns: Tensor, fit: AffineFit, rounded: list[tuple[Tensor, Tensor]]
    ) -> Fitted:
        """The codes under rounded scales and minimums; those of `fit` where a scale became 0."""
        (d, scales), (dmin, mins) = rounded
        step, offset = d.float() * scales, dmin.float() * mins
        levels = nearest((columns + offset.reshape(-1)) / step.reshape(-1)).clamp_(0, cls.high)
        levels = torch.where(step.reshape(-1) == 0, fit.levels, levels)
        fields = d, dmin, scales, mins
        return Fitted(Scales(step, -offset, fields), cls.in_blocks(levels))

    @classmethod
    def own_weights(cls, x: Tensor) -> Tensor:
        """Error weights of sub-blocks [sub, n] that nothing else is known of."""
        size = x.abs()
        return size if cls.sub == 16 else size + square_root(sum_columns(x * x) / cls.sub)

    @classmethod
    def round_scales(cls, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Scales [n * 256 / sub] as d float16 [n, 1] and uint8 [n, 256 / sub], the largest at
        scale_high."""
        scales = scales.view(-1, BLOCK // cls.sub)
        largest = scales.nan_to_num(0.0).amax(-1, keepdim=True)
        largest = torch.where(largest > 0, largest, 0.0)
        high = torch.tensor(float(cls.scale_high), device=scales.device)
        inverse = torch.where(largest > 0, high / largest, 0.0)
        codes = nearest(inverse * scales).remainder_(256).clamp_(max=cls.scale_high)
        return (largest / high).to(torch.float16), codes.to(torch.uint8)

    @classmethod
    def search_scales(cls, fit: AffineFit, weight: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The same of scales and of minimums by a search, `weight` being a sub-block's total."""
        count = BLOCK // cls.sub
        both = torch.cat([fit.scale, fit.minimum]).view(-1, count).T.contiguous()
        weight = weight.view(-1, count).T.repeat(1, 2)
        found = positive_search(both, weight, cls.scale_high)
        d = found.scale.view(2, -1, 1).to(torch.float16)
        codes = found.levels.T.to(torch.uint8).view(2, -1, count)
        return list(zip(d, codes, strict=True))

    @classmethod
    @abstractmethod
    def pack(cls, d: Tensor, dmin: Tensor, scales: Tensor, mins: Tensor, q: Tensor) -> Tensor:
        """d, dmin float16 [n, 1]; uint8 scales, mins [n, 256 / sub]; codes int8 [n, 256] to [n,
        nbytes]."""

    @classmethod
    def values(cls, d: Tensor, dmin: Tensor, scales: Tensor, mins: Tensor, q: Tensor) -> Tensor:
        """The bytes of d and dmin and the unpacked fields to float32 [n, 256]."""
        step = (from_half_bytes(d) * scales).unsqueeze(-1)
        offset = (from_half_bytes(dmin) * mins).unsqueeze(-1)
        return (step * q.view(len(q), -1, cls.sub) - offset).flatten(1)


class Q2_K(AffineKCodec):
    """16 bytes of scales (low nibble) and minimums; 64 bytes of codes; d; dmin."""

    name, nbytes, sub, high, scale_high = "Q2_K", 84, 16, 3, 15
    trials = (-0.5, 0.1, 15)
    mean_square_factor = 1.0

    @classmethod
    def pack(cls, d: Tensor, dmin: Tensor, scales: Tensor, mins: Tensor, q: Tensor) -> Tensor:
        pairs, codes = scales | mins << 4, fields.to_rows(q.view(torch.uint8), 2)
        return torch.cat([pairs, codes, to_half_bytes(d), to_half_bytes(dmin)], -1)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        pairs, q, d, dmin = data.split([16, 64, 2, 2], -1)
        return cls.values(d, dmin, pairs & 0x0F, pairs >> 4, fields.from_rows(q, 2))


class Q4_K(AffineKCodec):
    """d; dmin; 12 bytes of 6-bit scales and minimums; 128 bytes of codes."""

    name, nbytes, sub, high, scale_high = "Q4_K", 144, 32, 15, 63
    trials = (-1.0, 0.1, 20)

    @classmethod
    def pack(cls, d: Tensor, dmin: Tensor, scales: Tensor, mins: Tensor, q: Tensor) -> Tensor:
        pairs, codes = fields.to_six_bit_pairs(scales, mins), fields.to_rows(q.view(torch.uint8), 4)
        return torch.cat([to_half_bytes(d), to_half_bytes(dmin), pairs, codes], -1)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        d, dmin, pairs, q = data.split([2, 2, 12, 128], -1)
        return cls.values(d, dmin, *fields.from_six_bit_pairs(pairs), fields.from_rows(q, 4))


class Q5_K(AffineKCodec):
    """d; dmin; 12 bytes of 6-bit scales and minimums; 32 bytes of fifth bits; 128 of the others."""

    name, nbytes, sub, high, scale_high = "Q5_K", 176, 32, 31, 63
    trials = (-0.5, 0.1, 15)

    @classmethod
    def pack(cls, d: Tensor, dmin: Tensor, scales: Tensor, mins: Tensor, q: Tensor) -> Tensor:
        pairs, q = fields.to_six_bit_pairs(scales, mins), q.view(torch.uint8)
        codes = fields.to_rows(q >> 4, 1), fields.to_rows(q & 0x0F, 4)
        return torch.cat([to_half_bytes(d), to_half_bytes(dmin), pairs, *codes], -1)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        d, dmin, pairs, high, low = data.split([2, 2, 12, 32, 128], -1)
        q = fields.from_rows(low, 4) | fields.from_rows(high, 1) << 4
        return cls.values(d, dmin, *fields.from_six_bit_pairs(pairs), q)


class SymmetricKCodec(KCodec):
    """16 sub-blocks of 16 with levels low .. -low - 1, scales of -scale_half .. scale_half - 1."""

    sub = 16
    scale_half: ClassVar[int]

    @classmethod
    def requantized(cls, columns: Tensor, fit: Fit, d: Tensor, scales: Tensor) -> Fitted:
        """The codes under d float16 [n, 1] and scales float32 [n, 16]; those of `fit` where the
        scale became 0."""
        step = d.float() * scales
        levels = nearest(columns / step.reshape(-1)).clamp_(cls.low, cls.high)
        levels = torch.where(step.reshape(-1) == 0, fit.levels, levels)
        return Fitted(Scales(step, None, (d, scales.to(torch.int8))), cls.in_blocks(levels))

    @classmethod
    def round_scales(cls, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Scales [n * 16] as d float16 [n, 1] and rounded scales [n, 16], the one of largest
        magnitude at -scale_half; both 0 where all are."""
        scales = scales.view(-1, BLOCK // cls.sub)
        largest = extreme(scales, -1)
        inverse = torch.where(largest == 0, 0.0, divide(-cls.scale_half, largest))
        d = torch.where(largest == 0, 0.0, 1 / inverse).to(torch.float16)
        return d, nearest(inverse * scales)

    @classmethod
    def values(cls, d: Tensor, scales: Tensor, levels: Tensor) -> Tensor:
        step = (from_half_bytes(d) * scales).unsqueeze(-1)
        return (step * levels.view(len(levels), -1, cls.sub)).flatten(1)


class Q3_K(SymmetricKCodec):
    """32 bytes of third bits; 64 of the others; 12 of 6-bit scales, minus 32; d."""

    name, nbytes, low, high, scale_half = "Q3_K", 110, -4, 3, 32

    @classmethod
    def encode_blocks(cls, x: Tensor, importance: Tensor | None) -> Tensor:
        if importance is not None:
            return cls.packed(cls.fit(x, cls.weights(x, importance, 2.0)))
        columns = cls.columns(x)
        fit = descent_search(columns, -cls.low)
        d, scales = cls.round_scales(fit.scale)
        scales = signed_byte(scales).clamp_(-32, 31)
        scales = torch.where(extreme(fit.scale.view(-1, 16), -1) == 0, -32, scales)
        return cls.packed(cls.requantized(columns, fit, d, scales))

    @classmethod
    def fit(cls, x: Tensor, weight: Tensor) -> Fitted:
        columns, weight = cls.columns(x), cls.columns(weight)
        fit = symmetric_search(columns, weight, -cls.low)
        total = sum_columns(weight).view(-1, 16).T.contiguous()
        rounded = symmetric_search(fit.scale.view(-1, 16).T.contiguous(), total, 32)
        d = rounded.scale.view(-1, 1).to(torch.float16)
        return cls.requantized(columns, fit, d, rounded.levels.T)

    @classmethod
    def pack(cls, d: Tensor, scales: Tensor, levels: Tensor) -> Tensor:
        """d float16 [n, 1]; int8 scales [n, 16], levels [n, 256] to [n, nbytes]."""
        q = (levels - cls.low).view(torch.uint8)
        packed = fields.to_six_bits((scales + 32).view(torch.uint8))
        codes = fields.to_rows(q >> 2, 1), fields.to_rows(q & 3, 2)
        return torch.cat([*codes, packed, to_half_bytes(d)], -1)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        high, low, packed, d = data.split([32, 64, 12, 2], -1)
        q = fields.from_rows(low, 2) | fields.from_rows(high, 1) << 2
        scales = fields.from_six_bits(packed).view(torch.int8) - 32
        return cls.values(d, scales, q.view(torch.int8) + cls.low)


class Q6_K(SymmetricKCodec):
    """128 bytes of the low four bits; 64 of the high two; 16 int8 scales; d."""

    name, nbytes, low, high, scale_half = "Q6_K", 210, -32, 31, 128

    @classmethod
    def encode_blocks(cls, x: Tensor, importance: Tensor | None) -> Tensor:
        return cls.packed(cls.fit(x, x * x if importance is None else importance))

    @classmethod
    def fit(cls, x: Tensor, weight: Tensor) -> Fitted:
        columns = cls.columns(x)
        fit = symmetric_search(columns, cls.columns(weight), -cls.low)
        d, scales = cls.round_scales(fit.scale)
        (step, shift, (d, scales)), levels = cls.requantized(
            columns, fit, d, signed_byte(scales.clamp_(max=127))
        )
        dead = extreme(fit.scale.view(-1, 16), -1).abs() < EPSILON  # all bytes are 0 there
        step, d, scales = (t.masked_fill(dead, 0) for t in (step, d, scales))
        return Fitted(Scales(step, shift, (d, scales)), levels.masked_fill(dead, cls.low))

    @classmethod
    def pack(cls, d: Tensor, scales: Tensor, levels: Tensor) -> Tensor:
        """d float16 [n, 1]; int8 scales [n, 16], levels [n, 256] to [n, nbytes]."""
        q = (levels - cls.low).view(torch.uint8)
        rows = q.view(-1, 2, 2, 64)
        low = (rows[:, :, 0] & 0x0F | rows[:, :, 1] << 4).flatten(1)
        parts = low, fields.to_rows(q >> 4, 2), scales.contiguous().view(torch.uint8)
        return torch.cat([*parts, to_half_bytes(d)], -1)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        low, high, scales, d = data.split([128, 64, 16, 2], -1)
        halves = low.reshape(-1, 2, 1, 64)
        q = torch.cat([halves & 0x0F, halves >> 4], 2).flatten(1) | fields.from_rows(high, 2) << 4
        return cls.values(d, scales.contiguous().view(torch.int8), q.view(torch.int8) + cls.low)


def signed_byte(x: Tensor) -> Tensor:
    """Whole numbers float32 as a signed byte holds them: its lowest eight bits."""
    return (x + 128).remainder_(256) - 128
