"""Sizes of tiles."""

from __future__ import annotations

from typing import NamedTuple


class GemmConfig(NamedTuple):
    """How a product of tokens with a weight is cut. block_m: tokens, 16 or more; block_n: rows of
    the weight; split_k: parts of K."""

    block_m: int
    block_n: int
    split_k: int
    num_warps: int
    num_stages: int


def padded(n: int) -> int:
    """The next power of two from n on: tiles have such sizes."""
    return 1 << (n - 1).bit_length()
