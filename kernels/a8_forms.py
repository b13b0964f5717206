"""Which tiles 8-bit activations run with: by the number of tokens, parts of K by the weight.

As in `wna16_forms`: a form's parts of K never depend on the batch, and `pinned_config` is one for
all.
"""

from __future__ import annotations

from .triton_ops.a8_gemm import A8Config
from .wna16_forms import parts_of_k

BLOCK_N = 64  # the narrowest block: what locks are counted for


def a8_config(rows: int, out_features: int, tiles: int, backend: str) -> A8Config:
    """The shipped configuration for `rows` tokens."""
    hip = backend == "hip"
    if rows <= 64:
        block_m = 16 if rows <= 16 else 64
        split = parts_of_k(out_features, tiles, programs=2 if rows <= 16 else 1)
        return A8Config(block_m, BLOCK_N, split, 4, 2 if hip else 5 if rows <= 16 else 4)
    if rows <= 256 or hip:
        return A8Config(128, 128, 1, 8, 2 if hip else 4)
    return A8Config(256, 128, 1, 8, 4)


def pinned_config(out_features: int, tiles: int, backend: str) -> A8Config:
    """The one configuration for every number of tokens, where no batch may change a bit."""
    return a8_config(64, out_features, tiles, backend)
