"""The block types by their names; blocks/ has them a family a file."""

from .blocks.base import Codec
from .blocks.legacy import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, AffineCodec, SymmetricCodec
from .blocks.plain import BF16, F16, F32

__all__ = [
    "BF16", "F16", "F32", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
    "AffineCodec", "Codec", "SymmetricCodec",
]  # fmt: skip
