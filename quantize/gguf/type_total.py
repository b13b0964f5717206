"""What a file holds of one block type, as reports count it."""

from __future__ import annotations

from typing import NamedTuple


class TypeTotal(NamedTuple):
    """Tensors of the type, their weights, and the bytes of their blocks."""

    tensors: int
    weights: int
    nbytes: int
