"""The numbers that a code can be: whole numbers of b bits, or small floats.

A quantized value is an element times a scale. An integer element is kept as int8; a float element,
E4M3 or E2M1, as float8_e4m3fn, which holds both exactly. Spec: OCP 8-bit Floating Point (OFP8) and
OCP Microscaling Formats (MX) 1.0; rounding is to nearest, ties to even, beyond the largest number
it saturates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E8M0_BIAS = 127  # of the 8-bit exponents that MX scales are


@dataclass(frozen=True)
class Elements:
    """What a format's codes are, such as "int4" or "float8" by `name`.

    lowest, highest: the ends of its range. dtype: what keeps them.
    """

    name: str
    lowest: float
    highest: float
    dtype: torch.dtype

    def snap_(self, x: Tensor) -> Tensor:
        """The nearest element of each entry of x float32, in place."""
        raise NotImplementedError


class IntElements(Elements):
    """Whole numbers."""

    def snap_(self, x: Tensor) -> Tensor:
        return x.round_().clamp_(self.lowest, self.highest)


class E4M3Elements(Elements):
    """1 sign, 4 exponent and 3 mantissa bits; no infinity, largest number 448."""

    def snap_(self, x: Tensor) -> Tensor:
        return x.copy_(x.clamp_(self.lowest, self.highest).to(torch.float8_e4m3fn))


class E2M1Elements(Elements):
    """0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""

    def snap_(self, x: Tensor) -> Tensor:
        magnitude = x.abs()
        # spacing 0.5 below 2, 1 below 4, then 2: round in units of it (half to even holds, since
        # an even multiple is an even mantissa)
        step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
        return x.div_(step).round_().mul_(step).clamp_(self.lowest, self.highest)


def int_elements(num_bits: int) -> Elements:
    """Signed codes of `num_bits`: -2^(b-1) to 2^(b-1) - 1."""
    half = 1 << (num_bits - 1)
    return IntElements(f"int{num_bits}", -half, half - 1, torch.int8)


E4M3 = E4M3Elements("float8", -E4M3_MAX, E4M3_MAX, torch.float8_e4m3fn)
E2M1 = E2M1Elements("float4", -E2M1_MAX, E2M1_MAX, torch.float8_e4m3fn)


def mx_exponents(peak: Tensor, elements: Elements) -> Tensor:
    """The exponent of each MX group's power-of-two scale, float32, -127 to 127; `peak` float32.

    OCP MX 1.0 takes floor(log2(peak)) less the exponent of the largest element, which saturates a
    peak of up to twice that power of two. Here, as in compressed-tensors, a peak in the last eighth
    below the next power of two (mantissa 1.75 or more) takes the next exponent. A peak of zero
    gets the lowest.
    """
    mantissa, exponent = torch.frexp(peak)  # mantissa 0.5 to 1
    largest = math.frexp(elements.highest)[1]
    taken = (exponent + (mantissa >= 0.875) - largest).float().clamp_(-E8M0_BIAS, E8M0_BIAS)
    return torch.where(peak > 0, taken, float(-E8M0_BIAS))


def elements_of(kind: str, num_bits: int) -> Elements:
    """The elements of a format: kind "int" or "float" and its width."""
    if kind == "int":
        return int_elements(num_bits)
    return E4M3 if num_bits == 8 else E2M1
