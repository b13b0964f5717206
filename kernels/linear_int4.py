"""Packed 4-bit linear on torch's own CPU kernel, `_weight_int4pack_mm_for_cpu`.

Contract of the op: x bf16 [M, in]; weight uint8 [out, in/2] in an order private to the op;
group_size 32, 64, 128 or 256; out a multiple of 16; scale_and_zero bf16 [groups, out, 2], and a
weight is worth (u - 8) * scale + zero with u the unsigned code. Our value (code - zero_point) *
scale with code = u - 8 gives zero = -zero_point * scale. Scales are rounded to bf16, the sum is in
float32. With float32 or float16 activations the op falls to a scalar loop that is 10 to 50 times
slower, so those are declined. Its time grows with the rows of x: 16 rows take as long as a dense
product of 60. Above `MAX_ROWS` the weight is dequantized for a product in bfloat16 (float32 where
the CPU has none in bfloat16), if it is packed as the op packs it on CPUs with AVX512 or AVX2, 64 or
32 rows of it together, which a trial tells.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .linear_ops import LinearKernel, LinearOperands, LinearProblem
from .plain_linear import product_dtype, wide_linear
from .row_tiles import CPU_ROWS, in_row_tiles

GROUP_SIZES = (32, 64, 128, 256)
MAX_ROWS = 128
BLOCKS = (64, 32)  # rows of a weight whose codes of one column lie together


def _decline(problem: LinearProblem) -> str | None:
    if problem.device != "cpu":
        return f"runs on cpu, not {problem.device}"
    if problem.kind != "int":
        return "holds whole numbers, not floats"
    if problem.num_bits != 4:
        return f"holds 4-bit codes, not {problem.num_bits}-bit"
    if problem.dtype != torch.bfloat16:
        return f"computes in bfloat16, not {str(problem.dtype).removeprefix('torch.')}"
    if problem.group_size not in GROUP_SIZES:
        return f"group_size must be one of {GROUP_SIZES}, not {problem.group_size}"
    if problem.in_features % problem.group_size:
        return f"takes whole groups, not {problem.in_features} columns in {problem.group_size}s"
    if problem.out_features % 16:
        return f"out_features must be a multiple of 16, not {problem.out_features}"
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        return "needs a CPU with AVX2 or AVX512"
    return None


def _pack(operands: LinearOperands, problem: LinearProblem) -> tuple[Tensor, ...]:
    unsigned = operands.codes.to(torch.int32) + 8
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unsigned.contiguous(), 1)
    scale, zero_point = operands.float_scale(), operands.zero_point
    zero = torch.zeros_like(scale) if zero_point is None else -zero_point.float() * scale
    scale_and_zero = torch.stack([scale.T, zero.T], dim=-1).to(torch.bfloat16).contiguous()
    return packed, scale_and_zero


def _run(
    x: Tensor, tensors: tuple[Tensor, ...], bias: Tensor | None, problem: LinearProblem
) -> Tensor:
    packed, scale_and_zero = tensors
    rows = x if x.ndim == 2 else x.reshape(-1, problem.in_features)
    count = rows.shape[0]  # len() of a tensor is a call of Python's
    if problem.batch_invariant and count != CPU_ROWS:
        return in_row_tiles(lambda tile: _run(tile, tensors, bias, problem), x)
    block = _block() if count > MAX_ROWS else None
    if block is not None and problem.out_features % block == 0:
        return wide_linear(x, _dequantize(packed, scale_and_zero, problem, block).t(), bias)
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, problem.group_size, scale_and_zero)
    if bias is not None:
        y += bias
    return y if x.ndim == 2 else y.view(*x.shape[:-1], problem.out_features)


def _unpack(packed: Tensor, columns: int, block: int) -> tuple[Tensor, Tensor]:
    """Unsigned codes of the first and the second half of each block's rows, uint8 [in, blocks,
    block / 2], from the packed weight [out, in / 2]."""
    pairs = packed.view(-1, columns, block // 2).transpose(0, 1)
    return pairs & 15, pairs >> 4


def _dequantize(
    packed: Tensor, scale_and_zero: Tensor, problem: LinearProblem, block: int
) -> Tensor:
    """The weight's transpose [in, out], in the dtype of the product."""
    columns, out = problem.in_features, problem.out_features
    dtype = product_dtype(torch.bfloat16, "cpu")
    w = packed.new_empty(columns, out // block, 2, block // 2, dtype=dtype)
    for half, codes in enumerate(_unpack(packed, columns, block)):
        w[:, :, half] = codes
    groups = w.view(-1, problem.group_size, out)
    scale, zero = scale_and_zero.unbind(-1)
    groups.sub_(8).mul_(scale.unsqueeze(1))
    if not problem.symmetric:
        groups.add_(zero.unsqueeze(1))
    return w.view(columns, out)


@functools.cache
def _block() -> int | None:
    """The one of BLOCKS by which this CPU's op packs; None: another way."""
    codes = (torch.arange(2 * 64 * 64) * 2654435761 // 128 % 16).int().view(-1, 64)  # no pattern
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    for block in BLOCKS:
        halves = torch.stack(_unpack(packed, codes.shape[1], block), 2)
        if torch.equal(halves.view(codes.shape[1], -1).T.int(), codes):
            return block
    return None


INT4PACK_CPU = LinearKernel("int4pack_cpu", _decline, _pack, _run)
