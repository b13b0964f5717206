"""RMS norm with the residual, and gated activations; kernels/norm_ops.py says what is computed.

Both are bound by bytes: each row is read once and written once. A norm keeps its row in registers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..norm_ops import Gate, Normed
from .checks import check_tensor
from .launch import Warps, launch, launch_backend
from .shim import jit, tl
from .tiles import padded

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_WIDTH = 32768
GATED_BLOCK = 1024


@jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, x_row, residual_row, eps,
    WIDTH: tl.constexpr, PAD: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Grid: rows. out, sum: contiguous."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PAD)
    mask = at < WIDTH
    x = tl.load(x_ptr + row * x_row + at, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + row * residual_row + at, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * WIDTH + at, rounded, mask=mask)
        x = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
    out = (x * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * WIDTH + at, out, mask=mask)


@jit
def gated_mul_kernel(x_ptr, out_ptr, x_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
                     GATE: tl.constexpr):  # fmt: skip
    """Grid: rows, blocks of columns. WIDTH: of the output, which is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    g = tl.load(x_ptr + row * x_row + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(x_ptr + row * x_row + WIDTH + at, mask=mask, other=0.0).to(tl.float32)
    if GATE == "silu":
        active = g / (1.0 + tl.exp(-g))
    elif GATE == "gelu":
        active = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        active = g / (1.0 + tl.exp(-2.0 * inner))  # 0.5 (1 + tanh y) = 1 / (1 + exp(-2 y))
    tl.store(out_ptr + row * WIDTH + at, (active * u).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Normed:
    """`rms_norm_reference` of x [..., n] float16, bfloat16 or float32, n at most MAX_WIDTH.

    Rows may be strided where x has two axes. ValueError, naming it, for a tensor that does not fit.
    """
    op, width = "rms_norm", x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(-1, width)
    check_tensor(op, "x", rows, (None, width), DTYPES)
    check_tensor(op, "weight", weight, (width,), DTYPES, x.device, contiguous=True)
    if width > MAX_WIDTH:
        raise ValueError(f"{op}: x has rows of {width}, more than {MAX_WIDTH}")
    if residual is not None:
        check_tensor(op, "residual", residual, x.shape, [x.dtype], x.device)
    added = residual
    if residual is not None and residual.dim() != 2:
        added = residual.reshape(-1, width)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(out)
    args = {
        "x_ptr": rows,
        "residual_ptr": added,
        "weight_ptr": weight,
        "out_ptr": out,
        "sum_ptr": total,
        "x_row": rows.stride(0),
        "residual_row": 0 if added is None else added.stride(0),
        "eps": eps,
    }
    constants = {"WIDTH": width, "PAD": padded(width), "RESIDUAL": residual is not None}
    warps = Warps(min(16, max(1, padded(width) // 512)), 1)
    launch(rms_norm_kernel, (len(rows),), args, constants, warps)
    return Normed(out.view(x.shape), x if total is None else total.view(x.shape))


def gated_mul(gate_up: Tensor, gate: Gate) -> Tensor:
    """`gated_mul_reference` of gate_up [..., 2 n] float16, bfloat16 or float32.

    ValueError, naming it, for a tensor that does not fit.
    """
    width = gate_up.shape[-1] // 2
    rows = gate_up if gate_up.dim() == 2 else gate_up.reshape(-1, gate_up.shape[-1])
    check_tensor("gated_mul", "gate_up", rows, (None, 2 * width), DTYPES)
    out = torch.empty(len(rows), width, dtype=gate_up.dtype, device=gate_up.device)
    args = {"x_ptr": rows, "out_ptr": out, "x_row": rows.stride(0)}
    constants = {"WIDTH": width, "BLOCK": min(GATED_BLOCK, padded(width)), "GATE": gate}
    grid = (len(rows), -(-width // GATED_BLOCK))
    warps = 2 if launch_backend() == "hip" else 4  # of 64 threads there: 16 bytes for each
    launch(gated_mul_kernel, grid, args, constants, Warps(warps, 1))
    return out.view(*gate_up.shape[:-1], width)
