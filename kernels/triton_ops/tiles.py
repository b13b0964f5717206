"""Sizes of tiles."""

from __future__ import annotations


def padded(n: int) -> int:
    """The next power of two from n on: tiles have such sizes."""
    return 1 << (n - 1).bit_length()
