"""Q6_K: 256 weights in 210 bytes, 16 sub-blocks of 16 with 8-bit scales under one float16 scale.

The type that llama.cpp gives the output matrix of a 4- or 5-bit file. Layout: ql 128 bytes, qh 64
bytes, 16 int8 sub-scales, d; value = d * sub_scale * level, level in [-32, 31]. The encoder makes
the reference's search (19 candidate scales a sub-block, error weighted by x^2) and keeps its order
of float32 additions, hence the loop over the 16 columns: the bytes depend on it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .codecs import Codec, from_half_bytes, to_half_bytes

SUB, LEVELS = 16, 32
EPSILON = 1e-15  # sub-blocks, and blocks of scales, below it count as zero


class Q6_K(Codec):
    name, block, nbytes = "Q6_K", 256, 210

    @classmethod
    def encode_blocks(cls, x: Tensor) -> Tensor:
        columns = x.view(-1, SUB).T.contiguous()
        scales, levels = search_scales(columns)
        scales = scales.view(-1, SUB)
        best = scales.gather(-1, scales.abs().argmax(-1, keepdim=True))
        dead = best.abs() < EPSILON
        inverse = divide(-128.0, torch.where(dead, 1.0, best))
        d = (1.0 / inverse).to(torch.float16)
        sub_scales = (inverse * scales).round().clamp(-128, 127).to(torch.int8)
        step = (d.float() * sub_scales).view(1, -1)
        requantized = round_levels(columns / torch.where(step == 0, 1.0, step))
        levels = torch.where(step == 0, levels, requantized) + LEVELS
        q = levels.T.reshape(-1, cls.block).to(torch.uint8)
        packed = pack_levels(q, sub_scales, d)
        return packed.masked_fill_(dead, 0)

    @classmethod
    def decode_blocks(cls, data: Tensor) -> Tensor:
        ql, qh, sub_scales, d = data.split([128, 64, 16, 2], -1)
        step = from_half_bytes(d) * sub_scales.contiguous().view(torch.int8)
        low, high = ql.reshape(-1, 2, 2, 32), qh.reshape(-1, 2, 1, 32)
        fours = torch.cat([low & 0x0F, low >> 4], 2)
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)
        q = fours | (high >> shifts & 3) << 4
        levels = q.reshape(-1, SUB, SUB).float() - LEVELS
        return (step.unsqueeze(-1) * levels).flatten(1)


def search_scales(x: Tensor) -> tuple[Tensor, Tensor]:
    """Columns x float32 [16, n] of n sub-blocks: their scales [n] and levels float32 [16, n].

    Candidates put the entry of largest magnitude at level -(32 + 0.1 i), i = 0, -9 .. 9; each is
    refit by least squares with weights x^2, the best fit wins, the earlier one on a tie.
    """
    largest = x.gather(0, x.abs().argmax(0, keepdim=True))
    dead = largest.abs() < EPSILON
    largest = torch.where(dead, 1.0, largest)
    weight = x * x
    levels = round_levels(divide(-LEVELS, largest) * x)
    xl, ll = fit(x, weight, levels)
    scale = torch.where(ll == 0, 0.0, xl / ll)
    error = scale * xl
    for i in range(-9, 10):
        if i == 0:
            continue
        top = -float(np.float32(LEVELS) + np.float32(0.1) * np.float32(i))
        candidate = round_levels(divide(top, largest) * x)
        xl, ll = fit(x, weight, candidate)
        better = (ll > 0) & (xl * xl > error * ll)
        levels = torch.where(better, candidate, levels)
        scale = torch.where(better, xl / ll, scale)
        error = torch.where(better, scale * xl, error)
    scale = torch.where(dead[0], 0.0, scale)
    return scale, torch.where(dead, -float(LEVELS), levels)


def fit(x: Tensor, weight: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over a sub-block of weight * x * level and weight * level^2, added in column order."""
    xl_terms, ll_terms = weight * x * levels, weight * levels * levels
    xl, ll = torch.zeros_like(x[0]), torch.zeros_like(x[0])
    for column in range(SUB):
        xl += xl_terms[column]
        ll += ll_terms[column]
    return xl, ll


def divide(a: float, b: Tensor) -> Tensor:
    """a / b rounded once; torch's own number / tensor is a * (1 / b), rounded twice."""
    return torch.tensor(a, dtype=torch.float32) / b


def round_levels(scaled: Tensor) -> Tensor:
    """Half to even, clamped to [-32, 31]; float32."""
    return scaled.round().clamp_(-LEVELS, LEVELS - 1)


def pack_levels(q: Tensor, sub_scales: Tensor, d: Tensor) -> Tensor:
    """Levels + 32 uint8 [n, 256], int8 [n, 16], float16 [n, 1] to uint8 [n, 210].

    Each half of 128 weights is four rows of 32: `ql` holds rows 0 and 1 in low nibbles, 2 and 3 in
    high ones; `qh` their upper two bits at shifts 0, 2, 4, 6.
    """
    rows = q.view(-1, 2, 4, 32)
    low = rows & 0x0F
    ql = low[:, :, :2] | low[:, :, 2:] << 4
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1)
    qh = (rows >> 4 << shifts).sum(2, dtype=torch.uint8)
    scales = sub_scales.view(torch.uint8)
    return torch.cat([ql.flatten(1), qh.flatten(1), scales, to_half_bytes(d)], -1)
