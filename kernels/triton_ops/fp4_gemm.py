# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""`fp4_gemm`: 4-bit floats times 4-bit floats, NVFP4 and MXFP4, on tensor cores that take them.

    y[m, n] = sum_k x[m, k] * x_scale[m, g(k)] * w[n, k] * w_scale[n, g(k)] * factor + bias[n]

x [M, K/2] and w [N, K/2] uint8, two E2M1 elements a byte, the first in its low half
(`packing.pack_e2m1`). NVFP4: groups of 16, scales float8_e4m3fn [M or N, K/16], factor the product
of both tensors' scales. MXFP4: groups of 32, scales uint8 exponents [M or N, K/32], factor 1.
factor float32 [1]; bias [N] and y [M, N] float16, bfloat16 or float32. K is a multiple of 128.

For sm_100 alone: elsewhere Triton would emulate it by unpacking to bfloat16 in every program, and
weights that are dequantized once, when they are loaded, are faster. The interpreter has no
`dot_scaled`; there the elements are unpacked and multiplied in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_tensor
from .launch import Warps, launch
from .shim import INTERPRETED, jit, tl

OP = "fp4_gemm"
BLOCK_K = 128
OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_GROUPS = {torch.float8_e4m3fn: 16, torch.uint8: 32}


class FP4Config(NamedTuple):
    """Tile sizes: tokens, rows of the weight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def fp4_config(rows: int) -> FP4Config:
    """The shipped configuration for `rows` tokens."""
    return FP4Config(16 if rows <= 16 else 64 if rows <= 64 else 128, 128, 4, 4)


@jit
def _elements(packed, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """E2M1 elements of uint8 [ROWS, BYTES], float32 [ROWS, 2 * BYTES]."""
    nibbles = tl.join(packed & 15, packed >> 4).reshape(ROWS, 2 * BYTES).to(tl.int32)
    magnitude = nibbles & 7
    normal = (magnitude | 2) & 3  # 2 or 3 halves
    normal = normal.to(tl.float32) * 0.5 * tl.exp2(((magnitude >> 1) - 1).to(tl.float32))
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    return tl.where(nibbles > 7, -value, value)


@jit
def _scaled(packed, scale, ROWS: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr):
    """The numbers that elements and scales stand for, float32 [ROWS, 2 * BYTES]."""
    value = tl.exp2(scale.to(tl.float32) - 127.0) if GROUP == 32 else scale.to(tl.float32)
    GROUPS: tl.constexpr = 2 * BYTES // GROUP
    spread = tl.broadcast_to(value[:, :, None], (ROWS, GROUPS, GROUP)).reshape(ROWS, 2 * BYTES)
    return _elements(packed, ROWS, BYTES) * spread


@jit
def fp4_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    factor_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    row_bytes,
    stride_xm,
    stride_om,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tl.arange(0, BLOCK // 2)
    g = tl.arange(0, BLOCK // GROUP)
    on_n, on_m = n < N, m < M
    groups = K // GROUP
    w_at = w_ptr + n.to(tl.int64)[:, None] * row_bytes + i[None, :]
    x_at = x_ptr + m.to(tl.int64)[:, None] * stride_xm + i[None, :]
    ws_at = w_scale_ptr + n.to(tl.int64)[:, None] * groups + g[None, :]
    xs_at = x_scale_ptr + m.to(tl.int64)[:, None] * groups + g[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in tl.range(0, K // BLOCK, num_stages=STAGES):
        w = tl.load(w_at + step * (BLOCK // 2), mask=on_n[:, None], other=0)
        x = tl.load(x_at + step * (BLOCK // 2), mask=on_m[:, None], other=0)
        ws = tl.load(ws_at + step * (BLOCK // GROUP), mask=on_n[:, None], other=0.0)
        xs = tl.load(xs_at + step * (BLOCK // GROUP), mask=on_m[:, None], other=0.0)
        if INTERPRETED:
            left = _scaled(w, ws, BLOCK_N, BLOCK // 2, GROUP)
            acc += tl.dot(left, tl.trans(_scaled(x, xs, BLOCK_M, BLOCK // 2, GROUP)))
        else:
            acc = tl.dot_scaled(w, ws, "e2m1", tl.trans(x), xs, "e2m1", acc)
    acc *= tl.load(factor_ptr)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=on_n, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + m.to(tl.int64)[None, :] * stride_om + n[:, None]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=on_n[:, None] & on_m[None, :])


def fp4_gemm(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    factor: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: FP4Config,
) -> Tensor:
    """y [M, N] in `dtype`; see the module. ValueError, naming the tensor, when one does not fit."""
    check_tensor(OP, "x", x, (None, None), (torch.uint8,))
    rows, columns = x.shape[0], 2 * x.shape[1]
    if columns % BLOCK_K:
        raise ValueError(f"{OP}: K must be a multiple of {BLOCK_K}, not {columns}")
    if dtype not in OUT_DTYPES:
        raise ValueError(f"{OP}: makes float16, bfloat16 or float32, not {dtype}")
    check_tensor(OP, "w", w, (None, columns // 2), (torch.uint8,), x.device, contiguous=True)
    kinds = tuple(_GROUPS)
    check_tensor(OP, "w_scale", w_scale, (len(w), None), kinds, x.device, contiguous=True)
    group = _GROUPS[w_scale.dtype]
    for name, scale, count in (("w_scale", w_scale, len(w)), ("x_scale", x_scale, rows)):
        shape = (count, columns // group)
        check_tensor(OP, name, scale, shape, (w_scale.dtype,), x.device, contiguous=True)
    check_tensor(OP, "factor", factor, (1,), (torch.float32,), x.device)
    if bias is not None:
        check_tensor(OP, "bias", bias, (len(w),), OUT_DTYPES, x.device)
    y = x.new_empty(rows, len(w), dtype=dtype)
    args = {
        "x_ptr": x, "x_scale_ptr": x_scale, "w_ptr": w, "w_scale_ptr": w_scale,
        "factor_ptr": factor, "bias_ptr": bias, "out_ptr": y, "M": rows, "N": len(w),
        "K": columns,
        "row_bytes": columns // 2, "stride_xm": x.stride(0), "stride_om": y.stride(0),
    }  # fmt: skip
    constants = {
        "GROUP": group, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK": BLOCK_K,
        "STAGES": config.num_stages,
    }  # fmt: skip
    grid = (-(-len(w) // config.block_n), -(-rows // config.block_m))
    launch(fp4_kernel, grid, args, constants, Warps(config.num_warps, config.num_stages))
    return y
