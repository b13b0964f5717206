"""The types whose every weight is step * level + shift: first the scales, then codes under them.

`fit` searches a block's scales and its codes at once, as an encoder needs them. Whoever chooses the
codes otherwise (gguf/gptq.py) takes the scales alone, rounds with `nearest` and stores with `pack`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .base import Codec


class Scales(NamedTuple):
    """Of n blocks: `step` and `shift` float32 [n, sub-blocks], as a decoder computes them from the
    rounded `fields`, [n, k] each, in which they are stored. `shift` None: 0."""

    step: Tensor
    shift: Tensor | None
    fields: tuple[Tensor, ...]


class Fitted(NamedTuple):
    """`codes`: the type's code_dtype [n, block]."""

    scales: Scales
    codes: Tensor


class ScaledCodec(Codec):
    """value = step * level + shift; a code is its level, a whole number from `low` to `high`, but
    in types that say otherwise. `sub`: weights that share a step."""

    sub: ClassVar[int]
    low: ClassVar[int]
    high: ClassVar[int]
    code_dtype: ClassVar[torch.dtype] = torch.int8

    @classmethod
    @abstractmethod
    def fit(cls, x: Tensor, weight: Tensor) -> Fitted:
        """The scales and codes that store x float32 [n, block] with little squared error, each
        weight's error counted `weight` float32 [n, block] times."""

    @classmethod
    def nearest(cls, scaled: Tensor) -> tuple[Tensor, Tensor]:
        """For weights (value - shift) / step of any shape, the nearest codes and their levels, both
        float32 or the codes in code_dtype."""
        levels = scaled.round().clamp_(cls.low, cls.high)
        return levels, levels

    @classmethod
    @abstractmethod
    def pack(cls, *parts: Tensor) -> Tensor:
        """The fields of Scales and the codes to uint8 [n, nbytes]."""

    @classmethod
    def packed(cls, fitted: Fitted) -> Tensor:
        return cls.pack(*fitted.scales.fields, fitted.codes)
