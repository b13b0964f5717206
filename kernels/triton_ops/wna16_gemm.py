# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""`wna16_gemm`: float activations times packed 2-, 3-, 4- or 8-bit weights.

    y[m, n] = sum_k x[m, k] * (code[n, k] - zero[group(k), n]) * scale[group(k), n] + bias[n]

x [M, K] float16 or bfloat16, rows at any stride, columns contiguous; the weight as
`wna16_layout.PackedWeight`; bias [N] in x's dtype or None; y [M, N] in x's dtype. A group is 32,
64, 128, ... columns (GROUP 0: all of them). Sums are in float32.

The weights are the tile's rows and tokens its columns (y is transposed at the store), so
that few tokens still fill the 64 rows that Hopper's and Blackwell's tensor cores want, with
unpacked weights in registers. Codes are multiplied as whole numbers, exact in either dtype, and
each group's sum is scaled in float32: no scaled weight is ever rounded. One pass over the weights
serves BLOCK_M tokens.

Programs share K in SPLIT_K fixed parts; the one that finishes a tile last adds the parts in
their order. Neither SPLIT_K nor the order inside a part depends on M, so a row of y has
the same bits whatever else is in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..wna16_layout import (
    RUN,
    PackedWeight,
    WNA16Format,
    decline_groups,
    tile_columns,
    tile_planes,
)
from .checks import check_tensor
from .device_math import put_part, sum_parts
from .launch import Warps, launch, launch_backend
from .shim import jit, tl
from .tiles import GemmConfig
from .wna16_tile import group_row, group_values, load_planes, multiply_tile, tile_codes

OP = "wna16_gemm"
LOCK_ROWS = 64
"""Tiles of tokens that a weight has locks for: more rows run in several launches."""
DEQUANTIZE_ROWS = 64


@jit
def wna16_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    lock_ptr,
    M,
    N,
    K,
    tiles,
    stride_xm,
    stride_om,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    PLANES: tl.constexpr,
    GROUP: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.arange(0, 32)
    on_n, on_m = n < N, m < M
    x_at = x_ptr + m.to(tl.int64)[:, None] * stride_xm + i[None, :]
    word_at = words_ptr + n[:, None] * 32 + i[None, :]
    per_part = tl.cdiv(tiles, SPLIT_K)
    words_in_tile = tl.cast(N, tl.int64) * (PLANES * 32)

    # one scale a row: its zero-point is read here, and it multiplies the whole sum at the end
    _, row_zero = group_values(
        scale_ptr + n, on_n & (GROUP == 0 and ASYMMETRIC), DTYPE, BITS, ASYMMETRIC, BLOCK_N
    )
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for tile in tl.range(
        part * per_part, tl.minimum((part + 1) * per_part, tiles), num_stages=STAGES
    ):
        acc = multiply_tile(
            acc, tile, x_at, word_at + tile * words_in_tile, scale_ptr + n, row_zero, on_m, on_n, N,
            K, BITS, TILE, GROUP, ASYMMETRIC, WHOLE_TILES, ASM, BLOCK_M, BLOCK_N,
        )  # fmt: skip

    on = on_n[:, None] & on_m[None, :]
    if SPLIT_K > 1:
        lock = lock_ptr + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        at = partial_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
        stride = tl.cast(M, tl.int64) * N
        if not put_part(acc, at + part * stride, on, lock, SPLIT_K):
            return
        acc = sum_parts(at, stride, on, lock, SPLIT_K)
    if GROUP == 0:
        row_scale, row_zero = group_values(scale_ptr + n, on_n, DTYPE, BITS, ASYMMETRIC, BLOCK_N)
        acc *= row_scale[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=on_n, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + m.to(tl.int64)[None, :] * stride_om + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=on)


@jit
def wna16_dequantize_kernel(
    words_ptr,
    scale_ptr,
    out_ptr,
    first_row,
    rows,
    N,
    K,
    BITS: tl.constexpr,
    TILE: tl.constexpr,
    PLANES: tl.constexpr,
    GROUP: tl.constexpr,
    ASYMMETRIC: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows first_row .. first_row + rows of the weight, out [rows, K]."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    GROUPS: tl.constexpr = TILE // GROUP if GROUP > 0 and GROUP < TILE else 1
    SLOTS: tl.constexpr = TILE // (32 * GROUPS)
    tile = tl.program_id(0)
    local = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    on_n = local < rows
    n = first_row + local
    i = tl.arange(0, 32)
    at = words_ptr + tl.cast(N, tl.int64) * (PLANES * 32) * tile + n[:, None] * 32 + i[None, :]
    words, second, bits = load_planes(at, N * 32, on_n, BITS)
    out = out_ptr + local.to(tl.int64)[:, None] * K + i[None, :]
    for g in tl.static_range(GROUPS):
        row = group_row(tile, g, GROUP, TILE)
        scale, zero = group_values(scale_ptr + row * N + n, on_n, DTYPE, BITS, ASYMMETRIC, BLOCK_N)
        for j in tl.static_range(SLOTS):
            codes = tile_codes(words, second, bits, zero, g * SLOTS + j, BITS, ASM)
            value = codes.to(tl.float32) * scale[:, None]
            column = tile * TILE + (g * SLOTS + j) * 32
            on = on_n[:, None] & (column + i[None, :] < K)
            tl.store(out + column, value.to(DTYPE), mask=on)


def wna16_gemm(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, fmt: WNA16Format, config: GemmConfig
) -> Tensor:
    """y [M, N]; see the module. ValueError, naming the tensor, when one does not fit."""
    check_tensor(OP, "x", x, (None, None), (torch.float16, torch.bfloat16))
    rows, columns = x.shape
    tiles, out_features = _check_weight(weight, columns, fmt, x.device)
    if bias is not None:
        check_tensor(OP, "bias", bias, (out_features,), (x.dtype,), x.device)
    y = x.new_empty(rows, out_features)
    split = min(config.split_k, tiles)
    step = config.block_m * LOCK_ROWS
    blocks = -(-out_features // config.block_n)
    assert weight.locks.numel() >= min(-(-rows // config.block_m), LOCK_ROWS) * blocks
    shape = (split, min(rows, step), out_features) if split > 1 else (0,)
    partial = x.new_empty(shape, dtype=torch.float32)
    constants = _constants(fmt) | {
        "WHOLE_TILES": columns % tile_columns(fmt.num_bits) == 0, "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "SPLIT_K": split, "STAGES": config.num_stages,
    }  # fmt: skip
    for start in range(0, rows, step):
        some = min(step, rows - start)
        args = {
            "x_ptr": x[start:], "words_ptr": weight.words, "scale_ptr": weight.scale,
            "bias_ptr": bias, "out_ptr": y[start:], "partial_ptr": partial,
            "lock_ptr": weight.locks, "M": some, "N": out_features, "K": columns, "tiles": tiles,
            "stride_xm": x.stride(0), "stride_om": y.stride(0),
        }  # fmt: skip
        grid = (blocks, split, -(-some // config.block_m))
        launch(wna16_kernel, grid, args, constants, Warps(config.num_warps, config.num_stages))
    return y


def wna16_dequantize(
    weight: PackedWeight, columns: int, fmt: WNA16Format, dtype: torch.dtype, start: int, stop: int
) -> Tensor:
    """Rows start..stop of the weight that the codes stand for, [stop - start, columns] in dtype:
    computed in float32, rounded once."""
    tiles, out_features = _check_weight(weight, columns, fmt, weight.words.device)
    if not 0 <= start <= stop <= out_features:
        raise ValueError(f"{OP}: rows {start} to {stop} of a weight with {out_features}")
    out = torch.empty(stop - start, columns, dtype=dtype, device=weight.words.device)
    args = {
        "words_ptr": weight.words, "scale_ptr": weight.scale, "out_ptr": out, "first_row": start,
        "rows": stop - start, "N": out_features, "K": columns,
    }  # fmt: skip
    grid = (tiles, -(-(stop - start) // DEQUANTIZE_ROWS))
    constants = _constants(fmt) | {"BLOCK_N": DEQUANTIZE_ROWS}
    launch(wna16_dequantize_kernel, grid, args, constants, Warps(4, 1))
    return out


def _constants(fmt: WNA16Format) -> dict[str, int | bool]:
    """What both kernels are compiled for."""
    return {
        "BITS": fmt.num_bits, "TILE": tile_columns(fmt.num_bits),
        "PLANES": tile_planes(fmt.num_bits), "GROUP": fmt.group_size,
        "ASYMMETRIC": fmt.asymmetric, "ASM": launch_backend() == "cuda",
    }  # fmt: skip


def _check_weight(
    weight: PackedWeight, columns: int, fmt: WNA16Format, device: torch.device
) -> tuple[int, int]:
    """(tiles, N) of a weight that fits inputs of `columns` on `device`."""
    reason = decline_groups(fmt.num_bits, fmt.group_size)
    if reason is not None:
        raise ValueError(f"{OP}: {reason}")
    tile, planes = tile_columns(fmt.num_bits), tile_planes(fmt.num_bits)
    tiles = -(-columns // tile)
    words, scale, locks = weight
    n = words.shape[2] if words.dim() == 4 else -1
    check_tensor(OP, "words", words, (tiles, planes, n, RUN), (torch.int16,), device, True)
    groups = -(-tiles * tile // fmt.group_size) if fmt.group_size else 1
    check_tensor(OP, "scale", scale, (groups, n), (torch.int32,), device, True)
    check_tensor(OP, "locks", locks, (None,), (torch.int32,), device, True)
    return tiles, n
