"""The types with blocks of 32 weights under one float16 scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.

A block stores its scale `d` (and, for the `_1` types, its minimum `m`) as float16, then the codes:
weight j and weight j + 16 share a byte, the fifth bits of the 5-bit types lie apart in 4 bytes.
`pack` writes given scales and codes, so that a quantized checkpoint is repacked without a second
rounding; the encoder first chooses them: from the range alone, or by a search where an importance
matrix says what errors cost.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from . import fields
from .fields import from_half_bytes, to_half_bytes
from .scaled import Fitted, ScaledCodec, Scales
from .search import affine_search, error_weights, extreme, sum_columns, symmetric_search

BLOCK = 32


class LegacyCodec(ScaledCodec):
    block = sub = BLOCK


class SymmetricCodec(LegacyCodec):
    """value = d * level with integer levels in [low, high]."""

    @classmethod
    def fitted(cls, d: Tensor, levels: Tensor) -> Fitted:
        """With d float32 [n, 1], which is rounded, and levels float32 [n, 32]."""
        half = d.to(torch.float16)
        return Fitted(Scales(half.float(), None, (half,)), levels.to(torch.int8))

    @classmethod
    @abstractmethod
    def pack(cls, d: Tensor, levels: Tensor) -> Tensor:
        """Scale [n, 1] (rounded to float16) and int8 levels [n, 32] to uint8 [n, nbytes]."""


class Q8_0(SymmetricCodec):
    """d f16; 32 int8. d = largest magnitude / 127, rounding half away from zero."""

    name, nbytes, low, high = "Q8_0", 34, -128, 127

    @classmethod
    def encode_blocks(cls, x: Tensor, importance: Tensor | None) -> Tensor:
        return cls.packed(cls.fit(x, x))

    @classmethod
    def fit(cls, x: Tensor, weight: Tensor) -> Fitted:
        """The range decides, whatever `weight` is."""
        d = x.abs().amax(-1, keepdim=True) / 127
        return cls.fitted(d, finite(round_half_away(x * reciprocal(d))))

    @classmethod
    def pack(cls, d: Tensor, levels: Tensor) -> Tensor:
        return torch.cat([to_half_bytes(d), levels.view(torch.uint8)], -1)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        levels = data[:, 2:].view(torch.int8)
        return from_half_bytes(data[:, :2]) * levels


class SearchedCodec(LegacyCodec):
    """A type that searches its scales where errors are weighted. The mean square that enters the
    weights is a row's, whatever its number of blocks."""

    uses_importance = True

    @classmethod
    def encode_rows(cls, x: Tensor, importance: Tensor | None) -> Tensor:
        if importance is None:
            return super().encode_rows(x, None)
        count = torch.tensor(float(x.shape[1]), device=x.device)
        square = sum_columns((x * x).T.contiguous()) / count
        weight = error_weights(x, importance, square.view(-1, 1))
        fitted = cls.fit(x.reshape(-1, BLOCK), weight.reshape(-1, BLOCK))
        return cls.packed(fitted).view(len(x), -1)


class SmallSymmetricCodec(SearchedCodec, SymmetricCodec):
    """d f16; the fifth bits, where there are any; 16 bytes of nibbles, level - low. The weight of
    largest magnitude becomes the level `low`, or the search puts it near there."""

    @classmethod
    def encode_blocks(cls, x: Tensor, importance: Tensor | None) -> Tensor:
        d = extreme(x, -1) / cls.low
        shifted = to_codes(x * reciprocal(d) + (0.5 - cls.low), cls.high - cls.low)
        return cls.pack(d, shifted.add_(cls.low))

    @classmethod
    def fit(cls, x: Tensor, weight: Tensor) -> Fitted:
        fit = symmetric_search(x.T.contiguous(), weight.T.contiguous(), -cls.low)
        return cls.fitted(fit.scale.view(-1, 1), fit.levels.T)

    @classmethod
    def pack(cls, d: Tensor, levels: Tensor) -> Tensor:
        q = (levels - cls.low).contiguous().view(torch.uint8)
        return torch.cat([to_half_bytes(d), *code_bytes(q, cls.high - cls.low)], -1)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        levels = codes_of(data[:, 2:]).view(torch.int8) + cls.low
        return from_half_bytes(data[:, :2]) * levels


class Q4_0(SmallSymmetricCodec):
    name, nbytes, low, high = "Q4_0", 18, -8, 7


class Q5_0(SmallSymmetricCodec):
    name, nbytes, low, high = "Q5_0", 22, -16, 15


class AffineCodec(SearchedCodec):
    """value = d * q + m with codes q in [0, high]: d, m f16; fifth bits; 16 bytes of nibbles."""

    low = 0

    @classmethod
    def encode_blocks(cls, x: Tensor, importance: Tensor | None) -> Tensor:
        m = x.amin(-1, keepdim=True)
        d = (x.amax(-1, keepdim=True) - m) / cls.high
        return cls.pack(d, m, to_codes((x - m) * reciprocal(d) + 0.5, cls.high))

    @classmethod
    def fit(cls, x: Tensor, weight: Tensor) -> Fitted:
        x, weight = x.T.contiguous(), weight.T.contiguous()
        fit = affine_search(x, weight, cls.high, -0.9, 0.05, 36, absolute=False)
        d, m = (s.view(-1, 1).to(torch.float16) for s in (fit.scale, -fit.minimum))
        return Fitted(Scales(d.float(), m.float(), (d, m)), fit.levels.T.to(torch.int8))

    @classmethod
    def pack(cls, d: Tensor, m: Tensor, q: Tensor) -> Tensor:
        """Scale, minimum [n, 1] (rounded to float16), int8 codes [n, 32] to uint8 [n, nbytes]."""
        codes = code_bytes(q.contiguous().view(torch.uint8), cls.high)
        return torch.cat([to_half_bytes(d), to_half_bytes(m), *codes], -1)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        d, m = from_half_bytes(data[:, :2]), from_half_bytes(data[:, 2:4])
        return d * codes_of(data[:, 4:]) + m


class Q4_1(AffineCodec):
    name, nbytes, high = "Q4_1", 20, 15


class Q5_1(AffineCodec):
    name, nbytes, high = "Q5_1", 24, 31


def reciprocal(d: Tensor) -> Tensor:
    """1 / d, and 0 where d is 0."""
    return torch.where(d == 0, 0.0, 1 / d)


def round_half_away(x: Tensor) -> Tensor:
    """The nearest integer, half away from zero."""
    size = x.abs()
    whole = size.floor()
    return x.sign() * (whole + (2 * (size - whole)).floor())


def to_codes(q: Tensor, high: int) -> Tensor:
    """q >= 0 truncated and capped at `high`, as int8."""
    return finite(q).trunc_().clamp_(0, high).to(torch.int8)


def finite(q: Tensor) -> Tensor:
    """NaN and infinities to 0: codes of blocks so small that 1 / d overflows and d is 0 as f16."""
    return q.nan_to_num(0.0, 0.0, 0.0)


def code_bytes(q: Tensor, high: int) -> list[Tensor]:
    """Codes uint8 [n, 32] from 0 to `high`, 15 or 31, as columns of bytes: fifth bits, nibbles."""
    nibbles = fields.to_nibbles(q)
    return [nibbles] if high == 15 else [fields.to_fifth_bits(q), nibbles]


def codes_of(data: Tensor) -> Tensor:
    """uint8 [n, 16] (nibbles) or [n, 20] (fifth bits before them) to codes uint8 [n, 32]."""
    nibbles = fields.from_nibbles(data[:, -16:])
    return nibbles if data.shape[1] == 16 else nibbles + fields.from_fifth_bits(data[:, :4])
