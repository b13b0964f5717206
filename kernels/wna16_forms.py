"""Which tiles W2/W3/W4/W8A16 runs with: a form by the number of tokens, parts of K by the shape.

A form's parts of K depend on the weight's shape alone, so a row has the same bits whatever batch
it is in as long as the form stays; `pinned_config` is one for every number of tokens. Parts are
counted so that a device's multiprocessors all have work.

128 tokens x 64 rows of 4 bits spill on sm_80, and on sm_90 in groups of 32; 128 x 128 with 8 warps
do not. Of 8 bits it is the other way round. Consumer GPUs and gfx942 have shared memory for two
stages of the wide tiles.
"""

from __future__ import annotations

from .triton_ops.tiles import GemmConfig

SMALL_ROWS = 16  # tokens up to which weights alone are waited for
FUSED_ROWS = {2: 64, 3: 32, 4: 128, 8: 128}
"""Tokens up to which one pass over packed weights of so many bits serves all: a tile of K has 256
columns of 2 bits and 512 of 3, whose inputs leave no room for more tokens."""
PROCESSORS = {80: 108, 86: 84, 89: 128, 90: 132, 100: 148, 120: 170, "gfx942": 304}
"""Multiprocessors of A100, RTX 3090, RTX 4090, H100 and H200, B200, RTX 5090 and MI300, by
`launch_arch`."""
COMMON_PROCESSORS = 132  # of a device that is none of them
BLOCK_N = 64  # the narrowest block of rows: locks and parts of K are counted for it
FORMS = (16, 32, 64, 128)  # tokens of a tile
BUCKETS = (*FORMS, 256, 512)  # numbers of tokens up to which one choice of tuning holds


def wna16_config(
    rows: int, out_features: int, tiles: int, num_bits: int, arch: int | str
) -> GemmConfig:
    """The shipped configuration for `rows` tokens, 1 to FUSED_ROWS, on `arch` (`launch_arch`)."""
    block_m = next(b for b in FORMS if b >= min(rows, FUSED_ROWS[num_bits]))
    small = block_m <= SMALL_ROWS
    split = parts_of_k(out_features, tiles, 2 if small else 1, arch)
    if isinstance(arch, str):
        return GemmConfig(block_m, BLOCK_N, split, 4, 2)
    stages = 3 if num_bits < 4 else 5 if small else 4
    if block_m == 128 and arch <= 90:
        stages = stages if arch in (80, 90) else 2
        if num_bits <= 4:
            return GemmConfig(block_m, 2 * BLOCK_N, split, 8, min(stages, 3))
    return GemmConfig(block_m, BLOCK_N, split, 4, stages)


def pinned_config(out_features: int, tiles: int, num_bits: int, arch: int | str) -> GemmConfig:
    """The one configuration for every number of tokens, where no batch may change a bit."""
    return wna16_config(64, out_features, tiles, num_bits, arch)


def wna16_candidates(
    rows: int, out_features: int, tiles: int, num_bits: int, arch: int | str
) -> list[GemmConfig | None]:
    """What is worth a trial for `rows` tokens, one of BUCKETS: the shipped choice first. None: the
    weight dequantized for a dense product, which is shipped above FUSED_ROWS."""
    shipped = wna16_config(rows, out_features, tiles, num_bits, arch)
    first = [None, shipped] if rows > FUSED_ROWS[num_bits] else [shipped]
    return [*first, *around(shipped, tiles)]


def around(shipped: GemmConfig, tiles: int) -> list[GemmConfig]:
    """Configurations like `shipped` of wider blocks, other parts of K, more or fewer stages."""
    splits = sorted({max(1, shipped.split_k // 2), shipped.split_k, min(2 * shipped.split_k, 16)})
    found = [
        GemmConfig(shipped.block_m, block_n, split, num_warps, stages)
        for block_n, num_warps in ((BLOCK_N, 4), (2 * BLOCK_N, 4), (2 * BLOCK_N, 8))
        for split in splits
        for stages in (2, 3, 4, 5)
        if split <= tiles
    ]
    return [config for config in found if config != shipped]


def parts_of_k(out_features: int, tiles: int, programs: int, arch: int | str) -> int:
    """A power of two that gives each multiprocessor of `arch` about `programs` programs, each at
    least two tiles, and no more than 16 parts."""
    blocks = -(-out_features // BLOCK_N)
    most = 1.5 * programs * PROCESSORS.get(arch, COMMON_PROCESSORS)
    split = 1
    while split < 16 and 2 * split * blocks <= most and 4 * split <= tiles:
        split *= 2
    return split
