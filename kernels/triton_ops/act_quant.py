# pyright: reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""`act_quant`: activations to int8 or FP8 (E4M3) with a scale a token or a group of columns.

The definition is `activations.quantize_activation`: scale = largest magnitude / half the format's
range (1 where that is zero), code = the nearest element of x / scale, in float32. x comes from one
of three places, each read once, and is never written in between:

- "plain": x [M, K] itself;
- "rms_norm": `norm_ops.rms_norm_reference` of x, after adding `residual` [M, K], which is
  overwritten by the sum, where there is one;
- "silu_mul": `norm_ops.gated_mul_reference`, silu(x) * up, both [M, K];

the last two without rounding what comes out of them to x's dtype before it is quantized.

x, residual, weight [K] and up are float16, bfloat16 or float32; rows at any stride, columns
contiguous. Codes [M, K] int8 or float8_e4m3fn; scales float32 [M, groups], held group by group; or
one given scale float32 [1] for all, as `fmt.static` says. A program takes a row, so K is at most
32768.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..activations import ActivationFormat
from .checks import check_tensor
from .device_math import round_even, to_e4m3
from .launch import Warps, launch
from .shim import jit, tl

OP = "act_quant"
MAX_COLUMNS = 1 << 15
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Quantized(NamedTuple):
    """codes [M, K]; scales float32 [M, 1] or [M, groups], or [1] where they are given."""

    codes: Tensor
    scales: Tensor


@jit
def act_quant_kernel(
    x_ptr,
    second_ptr,
    weight_ptr,
    static_ptr,
    codes_ptr,
    scale_ptr,
    M,
    K,
    stride_x,
    stride_second,
    eps,
    SOURCE: tl.constexpr,
    GROUP: tl.constexpr,
    HALF_RANGE: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    on = k < K
    x = tl.load(x_ptr + tl.cast(row, tl.int64) * stride_x + k, mask=on, other=0.0).to(tl.float32)
    second_at = second_ptr
    if second_ptr is not None:
        second_at = second_ptr + tl.cast(row, tl.int64) * stride_second + k
    if SOURCE == "rms_norm":
        if second_ptr is not None:
            x += tl.load(second_at, mask=on, other=0.0).to(tl.float32)
            x = x.to(second_ptr.dtype.element_ty)
            tl.store(second_at, x, mask=on)
            x = x.to(tl.float32)
        weight = tl.load(weight_ptr + k, mask=on, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x) / K + eps) * weight
    if SOURCE == "silu_mul":
        up = tl.load(second_at, mask=on, other=0.0).to(tl.float32)
        x = x / (1.0 + tl.exp(-x)) * up
    groups = tl.reshape(x, (BLOCK_K // GROUP, GROUP))
    if static_ptr is not None:
        scale = tl.zeros((BLOCK_K // GROUP,), tl.float32) + tl.load(static_ptr)
    else:
        scale = tl.div_rn(tl.max(tl.abs(groups), axis=1), HALF_RANGE)
        scale = tl.where(scale == 0.0, 1.0, scale)
    codes = tl.div_rn(groups, tl.broadcast_to(scale[:, None], (BLOCK_K // GROUP, GROUP)))
    codes = tl.reshape(tl.minimum(tl.maximum(codes, LOWEST), HIGHEST), (BLOCK_K,))
    codes_at = codes_ptr + tl.cast(row, tl.int64) * K + k
    if codes_ptr.dtype.element_ty == tl.int8:
        tl.store(codes_at, round_even(codes).to(tl.int8), mask=on)
    else:
        tl.store(codes_at, to_e4m3(codes), mask=on)
    if static_ptr is None:
        g = tl.arange(0, BLOCK_K // GROUP)
        tl.store(scale_ptr + tl.cast(g, tl.int64) * M + row, scale, mask=g * GROUP < K)


def act_quant(x: Tensor, fmt: ActivationFormat, scale: Tensor | None = None) -> Quantized:
    """Codes and scales of x [M, K]; scale float32 [1] where the format is static."""
    return _run("plain", x, fmt, scale)


def rms_norm_quant(
    x: Tensor,
    weight: Tensor,
    eps: float,
    fmt: ActivationFormat,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
) -> Quantized:
    """Codes and scales of the normalized x [M, K]; `residual` is overwritten by x + residual."""
    return _run("rms_norm", x, fmt, scale, residual, weight, eps)


def silu_mul_quant(
    gate: Tensor, up: Tensor, fmt: ActivationFormat, scale: Tensor | None = None
) -> Quantized:
    """Codes and scales of silu(gate) * up, both [M, K]."""
    return _run("silu_mul", gate, fmt, scale, up)


def _run(
    source: Literal["plain", "rms_norm", "silu_mul"],
    x: Tensor,
    fmt: ActivationFormat,
    static: Tensor | None,
    second: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 0.0,
) -> Quantized:
    check_tensor(OP, "x", x, (None, None), DTYPES)
    rows, columns = x.shape
    if columns > MAX_COLUMNS:
        raise ValueError(f"{OP}: x has {columns} columns, at most {MAX_COLUMNS} fit a program")
    if fmt.scale_dtype != torch.float32:
        raise ValueError(f"{OP}: makes float32 scales, not {fmt.scale_dtype}")
    if (static is not None) != fmt.static:
        raise ValueError(f"{OP}: a static format takes a scale, and no other does")
    if static is not None:
        check_tensor(OP, "scale", static, (1,), (torch.float32,), x.device)
    if second is not None:
        name = "residual" if source == "rms_norm" else "up"
        check_tensor(OP, name, second, (rows, columns), DTYPES, x.device)
    if weight is not None:
        check_tensor(OP, "weight", weight, (columns,), DTYPES, x.device)
    group = fmt.group_size
    if group is not None and (group < 16 or group & (group - 1)):
        raise ValueError(f"{OP}: groups must be a power of two of at least 16, not {group}")
    block = max(1 << max(columns - 1, 1).bit_length(), group or 16)
    codes = x.new_empty(rows, columns, dtype=fmt.elements.dtype)
    groups = 1 if group is None else -(-columns // group)
    scales = static if static is not None else x.new_empty(groups, rows, dtype=torch.float32)
    args = {
        "x_ptr": x, "second_ptr": second, "weight_ptr": weight, "static_ptr": static,
        "codes_ptr": codes, "scale_ptr": scales, "M": rows, "K": columns, "stride_x": x.stride(0),
        "stride_second": 0 if second is None else second.stride(0), "eps": float(eps),
    }  # fmt: skip
    constants = {
        "SOURCE": source, "GROUP": group or block, "HALF_RANGE": fmt.half_range,
        "LOWEST": float(fmt.elements.lowest), "HIGHEST": float(fmt.elements.highest),
        "BLOCK_K": block,
    }  # fmt: skip
    launch(act_quant_kernel, (rows,), args, constants, Warps(row_warps(block), 1))
    return Quantized(codes, scales if fmt.static else scales.T)


def row_warps(block: int) -> int:
    """Warps for a row of `block` columns: 16 values a thread, up to 16 warps."""
    return min(16, max(1, block // 512))
