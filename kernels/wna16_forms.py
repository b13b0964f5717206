"""Which tiles W2/W3/W4/W8A16 runs with: a form by the number of tokens, parts of K by the shape.

A form's parts of K depend on the weight's shape alone, so a row has the same bits whatever batch
it is in as long as the form stays; `pinned_config` is one for every number of tokens. Programs are
counted for the 132 multiprocessors of an H100 on every device.

128 tokens x 64 rows of 4 bits spill on sm_80, 128 x 128 with 8 warps do not; of 8 bits it is the
other way round. Consumer GPUs and gfx942 have shared memory for two stages of the wide tiles.
"""

from __future__ import annotations

from .triton_ops.wna16_gemm import WNA16Config

SMALL_ROWS = 16  # tokens up to which weights alone are waited for
FUSED_ROWS = 128  # tokens up to which one pass over the packed weights serves all
PROCESSORS = 132
BLOCK_N = 64  # the narrowest block of rows: locks and parts of K are counted for it


def wna16_config(
    rows: int, out_features: int, tiles: int, num_bits: int, arch: int | str
) -> WNA16Config:
    """The shipped configuration for `rows` tokens, 1 to FUSED_ROWS, on `arch` (`launch_arch`)."""
    block_m = next(b for b in (16, 32, 64, 128) if b >= min(rows, FUSED_ROWS))
    small = block_m <= SMALL_ROWS
    split = parts_of_k(out_features, tiles, programs=2 if small else 1)
    if isinstance(arch, str):
        return WNA16Config(block_m, BLOCK_N, split, 4, 2)
    stages = 3 if num_bits < 4 else 5 if small else 4
    if block_m == 128 and arch < 90:
        stages = stages if arch == 80 else 2
        if num_bits <= 4:
            return WNA16Config(block_m, 2 * BLOCK_N, split, 8, min(stages, 3))
    return WNA16Config(block_m, BLOCK_N, split, 4, stages)


def pinned_config(out_features: int, tiles: int, num_bits: int, arch: int | str) -> WNA16Config:
    """The one configuration for every number of tokens, where no batch may change a bit."""
    return wna16_config(64, out_features, tiles, num_bits, arch)


def parts_of_k(out_features: int, tiles: int, programs: int) -> int:
    """A power of two that gives each multiprocessor about `programs` programs, each at least two
    tiles, and no more than 16 parts."""
    blocks = -(-out_features // BLOCK_N)
    split = 1
    while split < 16 and 2 * split * blocks <= 1.5 * programs * PROCESSORS and 4 * split <= tiles:
        split *= 2
    return split
