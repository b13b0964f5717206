# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""`a8_gemm`: 8-bit activations times 8- or 4-bit weights: W8A8, FP8 and W4A8.

    y[m, n] = sum_g (sum_{k in g} x[m, k] * w[n, k]) * w_scale[g, n] * x_scale[m, g] + bias[n]

x codes [M, K] int8 or float8_e4m3fn, rows at any stride; x_scale float32 [M, 1], [M, groups] at any
strides, or [1] for all. The weight as `a8_layout.A8Weight`, codes of x's kind; w_scale [1, N] or
[groups, N]. Groups are of 128 columns or a multiple (64 as well for W4A8); group_size 0: a row has
one. bias [N] and y [M, N] float16, bfloat16 or float32.

Whole numbers are summed exactly in int32 inside a group (a row has at most 65536 columns), 8-bit
floats in float32, in steps of 128 columns: Hopper's tensor cores keep fewer bits in longer sums.
Weights are the tile's rows, as in `wna16_gemm`, and the parts of K are fixed in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..a8_layout import TILE, A8Weight
from .checks import check_tensor
from .device_math import dot, put_part, sum_parts
from .launch import Warps, launch, launch_backend
from .shim import constexpr_function, jit, tl
from .tiles import GemmConfig

OP = "a8_gemm"
LOCK_ROWS = 64
MAX_COLUMNS = 1 << 16
OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@constexpr_function
def _halves_assembly(high):
    """PTX for four codes: the high or low halves of bytes $1 at the top of bytes $0."""
    if high:
        return "and.b32 $0, $1, 0xf0f0f0f0;"
    return "{ .reg .b32 t; shl.b32 t, $1, 4; and.b32 $0, t, 0xf0f0f0f0; }"


@jit
def _halves(packed, HIGH: tl.constexpr, ASM: tl.constexpr):
    """16 times the signed codes in the high or low halves of int8 bytes, int8."""
    if ASM:
        codes = tl.inline_asm_elementwise(
            _halves_assembly(HIGH), "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4
        )
    elif HIGH:
        codes = packed & -16
    else:
        codes = packed << 4
    return codes


@jit
def a8_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    lock_ptr,
    M,
    N,
    K,
    tiles,
    stride_xm,
    stride_sm,
    stride_sg,
    stride_om,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPED_X: tl.constexpr,
    WHOLE_TILES: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    WHOLE: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    SUM: tl.constexpr = tl.int32 if WHOLE else tl.float32
    CHAIN: tl.constexpr = WHOLE and GROUP == 0  # one exact sum over all of K
    RUN: tl.constexpr = 64 if BITS == 4 else 128
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.arange(0, RUN)
    on_n, on_m = n < N, m < M
    x_at = x_ptr + m.to(tl.int64)[:, None] * stride_xm + i[None, :]
    if BITS == 4:
        w_at = w_ptr + n[:, None] * 64 + i[None, :]
        w_step = tl.cast(N, tl.int64) * 64
    else:
        w_at = w_ptr + n.to(tl.int64)[:, None] * K + i[None, :]
        w_step = tl.full((), 128, tl.int64)
    per_part = tl.cdiv(tiles, SPLIT_K)

    acc = tl.zeros((BLOCK_N, BLOCK_M), SUM if CHAIN else tl.float32)
    for tile in tl.range(
        part * per_part, tl.minimum((part + 1) * per_part, tiles), num_stages=STAGES
    ):
        on_w = on_n[:, None]
        if BITS == 8 and not WHOLE_TILES:
            on_w = on_w & (tile * 128 + i[None, :] < K)
        w = tl.load(w_at + tile * w_step, mask=on_w, other=0.0)
        for j in tl.static_range(128 // RUN):
            column = tile * 128 + j * RUN
            on_x = on_m[:, None]
            if not WHOLE_TILES:
                on_x = on_x & (column + i[None, :] < K)
            x = tl.load(x_at + column, mask=on_x, other=0.0)
            codes = _halves(w, j == 1, ASM) if BITS == 4 else w
            if CHAIN:
                acc = dot(codes, tl.trans(x), acc)
            else:
                total = dot(codes, tl.trans(x), tl.zeros((BLOCK_N, BLOCK_M), SUM)).to(tl.float32)
                if GROUP > 0:
                    g = column // GROUP
                    total *= tl.load(w_scale_ptr + g * N + n, mask=on_n & (column < K), other=0.0)[
                        :, None
                    ]
                    if GROUPED_X:
                        x_scale = x_scale_ptr + m.to(tl.int64) * stride_sm + g * stride_sg
                        total *= tl.load(x_scale, mask=on_m & (column < K), other=0.0)[None, :]
                acc += total

    on = on_n[:, None] & on_m[None, :]
    if SPLIT_K > 1:
        lock = lock_ptr + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        at = partial_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
        stride = tl.cast(M, tl.int64) * N
        if not put_part(acc, at + part * stride, on, lock, SPLIT_K):
            return
        acc = sum_parts(at, stride, on, lock, SPLIT_K)
    y = acc.to(tl.float32)
    if GROUP == 0:
        y *= tl.load(w_scale_ptr + n, mask=on_n, other=0.0)[:, None]
    if not GROUPED_X:
        x_scale = x_scale_ptr + m.to(tl.int64) * stride_sm
        y *= tl.load(x_scale, mask=on_m, other=0.0)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=on_n, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + m.to(tl.int64)[None, :] * stride_om + n[:, None]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=on)


def a8_gemm(
    x: Tensor,
    x_scale: Tensor,
    weight: A8Weight,
    bias: Tensor | None,
    group_size: int,
    dtype: torch.dtype,
    config: GemmConfig,
) -> Tensor:
    """y [M, N] in `dtype`; see the module. ValueError, naming the tensor, when one does not fit."""
    check_tensor(OP, "x", x, (None, None), (torch.int8, torch.float8_e4m3fn))
    if dtype not in OUT_DTYPES:
        raise ValueError(f"{OP}: makes float16, bfloat16 or float32, not {dtype}")
    rows, columns = x.shape
    bits, out_features = _check_weight(x, weight, group_size)
    if bias is not None:
        check_tensor(OP, "bias", bias, (out_features,), OUT_DTYPES, x.device)
    stride_sm, stride_sg = _scale_strides(x, x_scale, group_size)
    tiles = -(-columns // TILE)
    split = min(config.split_k, tiles)
    step = config.block_m * (LOCK_ROWS if split > 1 else 65535)
    blocks = -(-out_features // config.block_n)
    y = x.new_empty(rows, out_features, dtype=dtype)
    exact = x.dtype == torch.int8 and group_size == 0
    shape = (split, min(rows, step), out_features) if split > 1 else (0,)
    partial = x.new_empty(shape, dtype=torch.int32 if exact else torch.float32)
    constants = {
        "BITS": bits, "GROUP": group_size, "GROUPED_X": stride_sg != 0,
        "WHOLE_TILES": columns % TILE == 0, "ASM": launch_backend() == "cuda",
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "SPLIT_K": split,
        "STAGES": config.num_stages,
    }  # fmt: skip
    for start in range(0, rows, step):
        some = min(step, rows - start)
        args = {
            "x_ptr": x[start:], "x_scale_ptr": x_scale[start:] if stride_sm else x_scale,
            "w_ptr": weight.codes, "w_scale_ptr": weight.scale, "bias_ptr": bias,
            "out_ptr": y[start:], "partial_ptr": partial, "lock_ptr": weight.locks,
            "M": some, "N": out_features, "K": columns, "tiles": tiles,
            "stride_xm": x.stride(0), "stride_sm": stride_sm, "stride_sg": stride_sg,
            "stride_om": y.stride(0),
        }  # fmt: skip
        grid = (blocks, split, -(-some // config.block_m))
        launch(a8_kernel, grid, args, constants, Warps(config.num_warps, config.num_stages))
    return y


def decline_a8(num_bits: int, group_size: int, columns: int) -> str | None:
    """Why the kernel cannot take such a weight (group_size 0: one scale a row), or None."""
    if columns > MAX_COLUMNS:
        return f"sums at most {MAX_COLUMNS} products, not {columns}"
    if num_bits == 8 and columns % 16:
        return f"loads 16 codes at once: {columns} columns are no multiple of 16"
    if group_size % TILE and not (num_bits == 4 and group_size == TILE // 2):
        return f"takes groups of a multiple of {TILE} columns, not {group_size}"
    return None


def _check_weight(x: Tensor, weight: A8Weight, group_size: int) -> tuple[int, int]:
    """(bits, N) of a weight that fits x."""
    columns, device = x.shape[1], x.device
    codes, scale, locks = weight
    bits = 4 if codes.dim() == 3 else 8
    reason = decline_a8(bits, group_size, columns)
    if reason is not None:
        raise ValueError(f"{OP}: {reason}")
    n = codes.shape[-2]
    shape = (-(-columns // TILE), n, TILE // 2) if bits == 4 else (n, columns)
    check_tensor(OP, "codes", codes, shape, (x.dtype,), device, contiguous=True)
    groups = -(-columns // group_size) if group_size else 1
    check_tensor(OP, "scale", scale, (groups, n), (torch.float32,), device, contiguous=True)
    check_tensor(OP, "locks", locks, (None,), (torch.int32,), device, contiguous=True)
    return bits, n


def _scale_strides(x: Tensor, x_scale: Tensor, group_size: int) -> tuple[int, int]:
    """Strides of x_scale from token to token and from group to group, 0 where they share."""
    rows, columns = x.shape
    if x_scale.dtype != torch.float32:
        raise ValueError(f"{OP}: x_scale is {x_scale.dtype}, not float32")
    if x_scale.numel() == 1 and x_scale.dim() == 1:
        return 0, 0
    groups = -(-columns // group_size) if group_size else 1
    if tuple(x_scale.shape) == (rows, 1):
        return x_scale.stride(0), 0
    if tuple(x_scale.shape) == (rows, groups):
        return x_scale.stride(0), x_scale.stride(1)
    shape = tuple(x_scale.shape)
    raise ValueError(f"{OP}: x_scale has shape {shape}, not (1), ({rows}, 1) or ({rows}, {groups})")
