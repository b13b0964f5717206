"""Packed 8-bit linear on torch's own CPU kernel, `_weight_int8pack_mm`.

Contract of the op: x [M, in]; weight int8 [out, in]; scale [out] in x's dtype, symmetric. It reads
whole vectors of the input axis without a bounds check, so other widths are declined here (tried: 33
columns crash, 40 give NaN). It scales after the sum, so in float32 it would differ from the
reference in the last bits for no gain in speed: float32 is left to the exact kernel. Above
`MAX_ROWS` rows of x, dequantizing once and multiplying is faster, and the plain layout allows it
without a second copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .affine import dequantize_affine
from .linear_ops import LinearKernel, LinearOperands, LinearProblem
from .plain_linear import product_dtype, wide_linear

MAX_ROWS = 64


def _decline(problem: LinearProblem) -> str | None:
    if problem.batch_invariant:
        return "its sums depend on the batch"
    if problem.device != "cpu":
        return f"runs on cpu, not {problem.device}"
    if problem.kind != "int":
        return "holds whole numbers, not floats"
    if problem.num_bits != 8:
        return f"holds 8-bit codes, not {problem.num_bits}-bit"
    if problem.dtype != torch.bfloat16:
        return f"used for bfloat16, not {str(problem.dtype).removeprefix('torch.')}"
    if not problem.symmetric:
        return "has no zero-point"
    if problem.group_size != problem.in_features:
        return f"takes one scale a row, not one for {problem.group_size} columns"
    if problem.in_features % 32:
        return f"in_features must be a multiple of 32, not {problem.in_features}"
    return None


def _pack(operands: LinearOperands, problem: LinearProblem) -> tuple[Tensor, ...]:
    assert operands.zero_point is None
    return operands.codes.contiguous(), operands.scale.reshape(-1).to(problem.dtype)


def _run(
    x: Tensor, tensors: tuple[Tensor, ...], bias: Tensor | None, problem: LinearProblem
) -> Tensor:
    codes, scale = tensors
    rows = x if x.ndim == 2 else x.reshape(-1, problem.in_features)
    if rows.shape[0] > MAX_ROWS:
        dtype = product_dtype(x.dtype, "cpu")
        return wide_linear(x, dequantize_affine(codes, scale.unsqueeze(-1), None, dtype), bias)
    y = torch.ops.aten._weight_int8pack_mm(rows, codes, scale)
    if bias is not None:
        y += bias
    return y if x.ndim == 2 else y.view(*x.shape[:-1], problem.out_features)


INT8PACK_CPU = LinearKernel("int8pack_cpu", _decline, _pack, _run)
