# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
# pyright: reportUnboundVariable=false
"""A tile of packed 2-, 3-, 4- or 8-bit weights on a device: its codes, and its product.

How tiles lie in memory: kernels/wna16_layout.py.
"""

from __future__ import annotations

from .device_math import dot
from .shim import jit, tl
from .unpack import magic_zero, unpack, unpack_3


@jit
def tile_codes(
    words, second, bits, zero, SLOT: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr
):
    """Codes less zero of the SLOT-th run of 32 columns of a tile, from its planes."""
    if BITS == 8:
        codes = unpack(words if SLOT < 2 else second, zero, 8, 8 * (SLOT % 2), ASM)
    elif BITS != 3:
        codes = unpack(words, zero, BITS, BITS * SLOT, ASM)
    elif SLOT < 8:
        codes = unpack_3(words, bits, zero, 2 * SLOT, SLOT, ASM)
    else:
        codes = unpack_3(second, bits, zero, 2 * (SLOT - 8), SLOT, ASM)
    return codes


@jit
def load_planes(at, stride, on_n, BITS: tl.constexpr):
    """The planes of a tile's rows, each [BLOCK_N, 32]; what there is not is the first again."""
    words = tl.load(at, mask=on_n[:, None], other=0)
    second, bits = words, words
    if BITS == 3 or BITS == 8:
        second = tl.load(at + stride, mask=on_n[:, None], other=0)
    if BITS == 3:
        bits = tl.load(at + 2 * stride, mask=on_n[:, None], other=0)
    return words, second, bits


@jit
def group_row(tile, g, GROUP: tl.constexpr, TILE: tl.constexpr):
    """The row of scales for the g-th group of a tile."""
    if GROUP == 0:
        row = 0
    elif GROUP < TILE:
        row = tile * (TILE // GROUP) + g
    else:
        row = tile // (GROUP // TILE)
    return row


@jit
def group_values(
    at, on_n, DTYPE: tl.constexpr, BITS: tl.constexpr, ASYMMETRIC: tl.constexpr, N: tl.constexpr
):
    """Scales float32 [N] at packed scales `at`, and what `unpack` takes away, [N, 32] in DTYPE."""
    packed = tl.load(at, mask=on_n, other=0)
    if ASYMMETRIC:
        scale = (packed & -256).to(tl.float32, bitcast=True)
        zero = magic_zero(packed & 255, DTYPE, BITS)
    else:
        scale = packed.to(tl.float32, bitcast=True)
        zero = magic_zero(tl.full((N,), 1 << (BITS - 1), tl.int32), DTYPE, BITS)
    return scale, tl.broadcast_to(zero[:, None], (N, 32))


@jit
def multiply_tile(
    acc, tile, x_at, plane, scale_at, row_zero, on_m, on_n, N, K, BITS: tl.constexpr,
    TILE: tl.constexpr, GROUP: tl.constexpr, ASYMMETRIC: tl.constexpr, WHOLE_TILES: tl.constexpr,
    ASM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_M] and the product of the tile whose planes begin at `plane` with its
    columns of x, each group's times its scale (GROUP 0: not yet).

    x_at: the first 32 columns of each token. scale_at: the first scale of each row. row_zero: what
    `unpack` takes away where a row has one zero-point.
    """
    DTYPE: tl.constexpr = x_at.dtype.element_ty
    GROUPS: tl.constexpr = TILE // GROUP if GROUP > 0 and GROUP < TILE else 1
    SLOTS: tl.constexpr = TILE // (32 * GROUPS)
    i = tl.arange(0, 32)
    words, second, bits = load_planes(plane, N * 32, on_n, BITS)
    for g in tl.static_range(GROUPS):
        if GROUP == 0:
            zero, total = row_zero, acc
        else:
            row = group_row(tile, g, GROUP, TILE)
            scale, zero = group_values(scale_at + row * N, on_n, DTYPE, BITS, ASYMMETRIC, BLOCK_N)
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for j in tl.static_range(SLOTS):
            column = tile * TILE + (g * SLOTS + j) * 32
            on_x = on_m[:, None]
            if not WHOLE_TILES:
                on_x = on_x & (column + i[None, :] < K)
            x = tl.load(x_at + column, mask=on_x, other=0.0)
            codes = tile_codes(words, second, bits, zero, g * SLOTS + j, BITS, ASM)
            total = dot(codes, tl.trans(x), total)
        if GROUP == 0:
            acc = total
        else:
            acc += total * scale[:, None]
    return acc
