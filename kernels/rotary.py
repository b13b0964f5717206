"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) as a table of cosines and sines.

All variants are tables: Llama 3's scaled frequencies, linear and dynamic scaling and YaRN change
the frequencies that a table is made of, and YaRN what it is multiplied with; a partial embedding
has fewer columns than half a head. What differs beside is which channels make a pair.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """cos, sin: float32 [positions, rotary_dim / 2]. Pair i is channels i and i + rotary_dim / 2
    (GPT-NeoX, as Hugging Face keeps Llama), or with `interleaved` 2 i and 2 i + 1 (GPT-J).
    Channels from rotary_dim on stay as they are."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cos.shape[1]


def rotary_table(
    inverse_frequencies: Tensor, positions: int, scaling: float = 1.0, interleaved: bool = False
) -> Rotary:
    """The table of positions 0 to `positions` - 1. inverse_frequencies: float32 [rotary_dim / 2];
    scaling: of both tables (YaRN's attention factor)."""
    at = torch.arange(positions, device=inverse_frequencies.device, dtype=torch.float32)
    angles = torch.outer(at, inverse_frequencies.float())
    return Rotary(angles.cos() * scaling, angles.sin() * scaling, interleaved)


def rotate_positions(x: Tensor, rotary: Rotary, positions: Tensor) -> Tensor:
    """x [tokens, heads, head_dim] float32 or float64 at `positions`, int [tokens]: a new tensor."""
    cos, sin = (table[positions].to(x.dtype).unsqueeze(1) for table in rotary[:2])
    size = rotary.rotary_dim
    turned = x[..., :size]
    if rotary.interleaved:
        pairs = turned.unflatten(-1, (-1, 2)).movedim(-1, 0)
    else:
        pairs = turned.unflatten(-1, (2, -1)).movedim(-2, 0)
    out = x.clone() if size < x.shape[-1] else torch.empty_like(x)
    first, second = (out[..., i:size:2] if rotary.interleaved else
                     out[..., i * size // 2 : (i + 1) * size // 2] for i in (0, 1))  # fmt: skip
    torch.mul(pairs[0], cos, out=first).addcmul_(pairs[1], sin, value=-1)
    torch.mul(pairs[1], cos, out=second).addcmul_(pairs[0], sin)
    return out
