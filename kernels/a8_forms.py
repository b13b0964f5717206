"""Which tiles 8-bit activations run with: by the number of tokens, parts of K by the weight.

As in `wna16_forms`: a form's parts of K never depend on the batch, and `pinned_config` is one for
all.
"""

from __future__ import annotations

from .triton_ops.tiles import GemmConfig
from .wna16_forms import around, parts_of_k

BLOCK_N = 64  # the narrowest block: what locks are counted for
BUCKETS = (16, 64, 256, 1024, 4096)  # numbers of tokens up to which one choice of tuning holds


def a8_config(
    rows: int, out_features: int, tiles: int, floats: bool, arch: int | str
) -> GemmConfig:
    """The shipped configuration for `rows` tokens on `arch` (`launch_arch`); floats: FP8."""
    hip = isinstance(arch, str)
    narrow = hip or 80 < arch < 90  # shared memory for two stages of wide tiles
    if rows <= 64 or (hip and floats):  # gfx942 unpacks E4M3 to float16, in many registers
        small = rows <= 16
        split = parts_of_k(out_features, tiles, 2 if small else 1, arch)
        return GemmConfig(
            16 if small else 64, BLOCK_N, split, 4, 2 if narrow else 5 if small else 4
        )
    return GemmConfig(128, 128, 1, 8, 2 if narrow else 4)


def pinned_config(out_features: int, tiles: int, floats: bool, arch: int | str) -> GemmConfig:
    """The one configuration for every number of tokens, where no batch may change a bit."""
    return a8_config(64, out_features, tiles, floats, arch)


def a8_candidates(
    rows: int, out_features: int, tiles: int, floats: bool, arch: int | str
) -> list[GemmConfig]:
    """What is worth a trial for `rows` tokens, one of BUCKETS: the shipped choice first."""
    shipped = a8_config(rows, out_features, tiles, floats, arch)
    return [shipped, *around(shipped, tiles)]
